# Every node of a cluster without GPUs: head, learner, rollout worker, sandbox host.
#   docker build --file deploy/docker/cpu.Dockerfile --tag toolrl:cpu .
# BASE is a Debian with Python 3.11. PIP_NO_INDEX and PIP_FIND_LINKS are pip's own, for a build without a package index.
ARG BASE=python:3.11.13-slim-bookworm

# What changes seldom, in layers that a change of the code leaves alone.
FROM ${BASE} AS dependencies
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
# vLLM's kernels link libnuma, and it compiles small ones at its start; bubblewrap is the interpreter's boundary where there
# is no Docker engine.
# hadolint ignore=DL3008
RUN dpkg --status g++ libnuma1 bubblewrap procps >/dev/null 2>&1 || (apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 bubblewrap procps \
    && rm -rf /var/lib/apt/lists/*)
COPY requirements/cpu.txt /tmp/cpu.txt
# Without what only GPUs need (a gigabyte) and what only those need who change toolrl.
RUN sed -E -i '/^(triton|trl|mypy|ruff|import-linter|grimp|hypothesis|pytest.*|types-.*)==/d' /tmp/cpu.txt \
    && python3 -m venv /opt/toolrl \
    && /opt/toolrl/bin/pip install --no-cache-dir torch==2.13.0 \
    && /opt/toolrl/bin/pip install --no-cache-dir --no-deps -r /tmp/cpu.txt \
    && rm /tmp/cpu.txt

FROM dependencies AS wheel
WORKDIR /build
COPY pyproject.toml README.md ./
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
RUN /opt/toolrl/bin/pip install --no-cache-dir --no-deps /tmp/dist/*.whl && rm -rf /tmp/dist \
    && echo 'toolrl:x:1000:1000::/home/toolrl:/usr/sbin/nologin' >>/etc/passwd && echo 'toolrl:x:1000:' >>/etc/group \
    && install --directory --mode=1777 /home/toolrl /runs
ENV PATH=/opt/toolrl/bin:$PATH HOME=/home/toolrl USER=toolrl DS_ACCELERATOR=cpu PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/toolrl
CMD ["toolrl", "--help"]
