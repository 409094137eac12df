"""`ray`: a job on a Ray cluster that runs already, and the file for Ray's own launcher that starts one on named machines."""

from __future__ import annotations

import json
import shlex
import sys

from toolrl.app.launch.nodes import groups
from toolrl.app.launch.target import RUN_FILE, Rendered, filled, run_file, targets
from toolrl.config import RunConfig
from toolrl.errors import UserError

CLUSTER = "ray-cluster.yaml"
TOKEN = "~/toolrl-launch/ray-token"  # where `ray up` has put it, on each node


@targets.register("ray")
def ray_job(config: RunConfig) -> Rendered:
    """The driver runs on the head. With `cluster.groups.*.hosts` also the file of `ray up`.

    Raises:
        UserError: secrets; a job's environment is kept by Ray and shown to everybody who may see the cluster.
    """
    if config.cluster.secrets:
        names = ", ".join(secret.variable for secret in config.cluster.secrets)
        raise UserError(
            f"cluster.secrets: Ray shows a job's environment to everybody who may see the cluster, so {names} cannot go with "
            "the job; set them on the cluster's nodes before `ray start`, and leave them out here"
        )
    files, found = {RUN_FILE: run_file(config)}, groups(config)
    nodes = 1
    if all(group.hosts for group in found):
        files[CLUSTER] = filled("ray-cluster.yaml.j2", config, exports=_exports(config))
        nodes = sum(group.nodes for group in found)
    jobs = [sys.executable, "-m", "toolrl.app.launch.ray_jobs"]
    address = config.cluster.job_address
    environment = json.dumps(config.cluster.environment)
    return Rendered(
        files=files,
        submit=[*jobs, "submit", address, config.name, RUN_FILE, str(nodes), environment],
        follow=[*jobs, "follow", address, "{id}"],
        state=[*jobs, "state", address, "{id}"],
        stop=[*jobs, "stop", address, "{id}"],
    )


def _exports(config: RunConfig) -> str:
    """What every node of `ray up` has in its environment, as a line of shell."""
    words = [f"{name}={shlex.quote(value)}" for name, value in config.cluster.environment.items()]
    if config.cluster.auth == "token":
        words += ["RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN_PATH={TOKEN}"]
    else:
        words.append("RAY_AUTH_MODE=disabled")
    return " ".join(["export", *words])
