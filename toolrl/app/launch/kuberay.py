"""`kuberay`: a RayJob with a group of pods for each kind of node; a RayCluster that stays, for those who submit many jobs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys

from toolrl.app.launch.kuberay_jobs import REQUEST_TIMEOUT, KubectlError, state_of
from toolrl.app.launch.nodes import ray_resources
from toolrl.app.launch.ray_jobs import ENTRYPOINT, STOP_DEADLINE_S
from toolrl.app.launch.target import CONFIG_FOLDER, RUN_FILE, Rendered, filled, run_file, targets
from toolrl.config import RunConfig
from toolrl.errors import UserError

JOB, STANDING = "rayjob.yaml", "raycluster.yaml"
JOB_FILE = "run.sh"  # KubeRay puts an entrypoint into a line of shell as it is: it holds no shell of its own


@targets.register("kuberay")
def kuberay(config: RunConfig) -> Rendered:
    """The job's pods end with it; `raycluster.yaml` is for `kubectl apply` by hand.

    Raises:
        UserError: a mount that is no claim, or a name that Kubernetes or KubeRay would refuse.
    """
    name = _object_name(config)
    for mount in config.cluster.mounts:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", mount.source):
            raise UserError(
                f"cluster.mounts: {mount.source!r} is no PersistentVolumeClaim's name; kuberay mounts claims, e.g. "
                f"cluster.mounts=[{{target: {mount.target}, source: toolrl-runs}}]"
            )
    files = {f: _manifest(config, name, kind) for f, kind in ((JOB, "RayJob"), (STANDING, "RayCluster"))}
    files[RUN_FILE] = run_file(config)  # for `toolrl launch NAME --resume`: the run's folder is seen by the pods alone
    namespace = config.cluster.namespace
    kubectl, jobs = ["kubectl", "--namespace", namespace], [sys.executable, "-m", "toolrl.app.launch.kuberay_jobs"]
    return Rendered(
        files=files,
        prepare=lambda folder: name_is_free(namespace, name),
        # The RayJob is the file's last object: its name is what is printed last.
        submit=[*kubectl, "apply", REQUEST_TIMEOUT, "--output=name", "--filename", JOB],
        follow=[*jobs, "follow", namespace, name],
        state=[*jobs, "state", namespace, name],
        stop=[*jobs, "stop", namespace, name],
    )


# KubeRay makes names of the run's: of its cluster, and of a Service, which Kubernetes allows 63 letters.
NAME_LENGTH = 47


def name_is_free(namespace: str, name: str) -> None:
    """`kubectl apply` would change another's run. Raises UserError, where Kubernetes does not answer too."""
    try:
        there = state_of(namespace, name)
    except KubectlError as error:
        raise UserError(f"kuberay: {error}") from None
    if there is not None:
        raise UserError(
            f"a RayJob {name} is there already ({there}): `toolrl stop {name}` or `kubectl --namespace {namespace} delete "
            f"rayjob/{name}` takes it away; or choose another name=…"
        )


def _object_name(config: RunConfig) -> str:
    """The run's, as Kubernetes writes names."""
    name = re.sub(r"[^a-z0-9-]+", "-", config.name.lower()).strip("-")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or len(name) > NAME_LENGTH:
        raise UserError(
            f"name={config.name}: on Kubernetes the run would be called {name!r}, and KubeRay takes names of at most "
            f"{NAME_LENGTH} letters, digits and '-' that begin with a letter; set name=…"
        )
    return name


def _manifest(config: RunConfig, name: str, kind: str) -> str:
    cluster = config.cluster
    # Without a mode, `ray start` would take a token of its own making.
    mode = {} if cluster.auth == "token" else {"RAY_AUTH_MODE": "disabled"}
    secrets = []
    for secret in cluster.secrets:
        source = {"secretKeyRef": {"name": secret.name, "key": secret.key or secret.variable}}
        secrets.append({"name": secret.variable, "valueFrom": source})
    return filled(
        "kuberay.yaml.j2",
        config,
        kind=kind,
        name=name,
        environment=[{"name": key, "value": value} for key, value in (cluster.environment | mode).items()],
        secrets=secrets,
        job_file=JOB_FILE,
        job_text=_job_text(),
        run_text=run_file(config).rstrip(),
        ray_resources=ray_resources,
        ray_version=ray_version(),
        stop_deadline_s=int(STOP_DEADLINE_S),
    )


def _job_text() -> str:
    """Its last line tells how the run ended. Ray looks every second for more of a log, and no more when the job has ended."""
    text = ENTRYPOINT.replace("RUN_FILE", f"{CONFIG_FOLDER}/{RUN_FILE}")
    return text.replace("exit $code", "sleep 3; exit $code")


def ray_version() -> str:
    """The one that is installed here, else the one that toolrl is tested with."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("ray")
    pinned = " ".join(importlib.metadata.requires("toolrl") or [])
    found = re.search(r"\bray\[default\]==([\d.]+)", pinned)
    if found is None:
        raise UserError("which version of Ray the image holds is not known: install ray here")
    return found.group(1)
