# Every node of a cluster with GPUs: head, learner, rollout worker; sandbox hosts may use the smaller image of cpu.Dockerfile.
#   docker build --file deploy/docker/gpu.Dockerfile --tag toolrl:gpu .
# CUDA's libraries come with the wheels; the driver comes from the host. The compiler is for Triton and DeepSpeed.
ARG BASE=nvidia/cuda:12.9.1-devel-ubuntu24.04

# What changes seldom, in layers that a change of the code leaves alone.
FROM ${BASE} AS dependencies
ARG PYTHON=3.12
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python${PYTHON} python${PYTHON}-venv python${PYTHON}-dev bubblewrap procps \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY pyproject.toml .
RUN python${PYTHON} -m venv /opt/toolrl && /opt/toolrl/bin/python -c "import tomllib; \
    project = tomllib.load(open('pyproject.toml', 'rb'))['project']; extras = project['optional-dependencies']; \
    print(*project['dependencies'], *extras['gpu'], *extras['tools'], 'setuptools>=78', 'wheel', sep='\n')" >requirements.txt \
    && /opt/toolrl/bin/pip install --no-cache-dir -r requirements.txt

FROM dependencies AS wheel
COPY README.md ./
COPY toolrl toolrl
COPY actors actors
COPY learner learner
COPY sandbox sandbox
COPY deploy deploy
RUN /opt/toolrl/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir dist .

FROM dependencies
COPY --from=wheel /build/dist /tmp/dist
COPY deploy/docker/node.sh /usr/local/bin/toolrl-node
# Under whichever user a node runs, it has a home; /runs is what a new volume there takes its rights from.
RUN /opt/toolrl/bin/pip install --no-cache-dir --no-deps /tmp/dist/*.whl && rm -rf /tmp/dist /build \
    && echo 'toolrl:x:1000:1000::/home/toolrl:/usr/sbin/nologin' >>/etc/passwd && echo 'toolrl:x:1000:' >>/etc/group \
    && install --directory --mode=1777 /home/toolrl /runs
ENV PATH=/opt/toolrl/bin:$PATH HOME=/home/toolrl USER=toolrl PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/toolrl
CMD ["toolrl", "--help"]
