"""`compose`: a cluster of containers on one machine, for trying out what a real one will do."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

from toolrl.app.launch.compose_machine import EXIT_CODE, node_user, prepare
from toolrl.app.launch.nodes import groups, ray_flags
from toolrl.app.launch.target import CONFIG_FOLDER, RUN_FILE, Rendered, filled, run_file, targets
from toolrl.config import RunConfig
from toolrl.errors import UserError

FILE = "compose.yaml"


@targets.register("compose")
def compose(config: RunConfig) -> Rendered:
    """One service a node. The head's exit code is the run's; the others end with it. Raises UserError."""
    for mount in config.cluster.mounts:
        if not mount.source.startswith("/"):
            raise UserError(
                f"cluster.mounts: {mount.source!r} is no absolute path; compose mounts folders of this machine, e.g. "
                f"cluster.mounts=[{{target: {mount.target}, source: /srv/toolrl/runs}}]"
            )
    found = groups(config)
    nodes = sum(group.nodes for group in found)
    services: list[dict[str, Any]] = []
    for group in found:
        for index in range(1, group.nodes + 1):
            if group.name == "head":
                command = ["toolrl-node", "head", str(nodes), *ray_flags(group), "--", *run_command()]
            else:
                command = ["toolrl-node", "worker", "head", *ray_flags(group)]
            name = group.name if group.nodes == 1 else f"{group.name}-{index}"
            services.append({"name": name, "group": group, "command": command})
    project = re.sub(r"[^a-z0-9_-]+", "-", config.name.lower())
    docker = ["docker", "compose", "--project-name", project, "--file", FILE]
    nodes_of = ["docker", "ps", "--all", f"--filter=label=com.docker.compose.project={project}"]
    head = " ".join([*nodes_of, "--filter=label=com.docker.compose.service=head", "--quiet"])
    down = [*docker, "down", "--timeout", "300"]
    return Rendered(
        files={FILE: filled("compose.yaml.j2", config, services=services), RUN_FILE: run_file(config)},
        readers=node_user() if os.getuid() == 0 else None,
        prepare=functools.partial(prepare, config, found, [*nodes_of, "--format={{.Names}}"]),
        submit=[*docker, "up", "--detach"],
        follow=["sh", "-c", _FOLLOW.replace("HEAD", head)],
        exit_code=["cat", EXIT_CODE],
        state=[*nodes_of, "--format={{.Names}}: {{.Status}}"],
        stop=down,
        finish=down,
    )


# Waited for from the start: whoever stops the run removes the container, and its exit code with it.
_FOLLOW = f"""
head=$(HEAD)
[ -n "$head" ] || exit 0
docker wait "$head" >{EXIT_CODE} &
waiting=$!
trap 'kill "$waiting"' INT TERM
docker logs --follow "$head"
wait
"""


def run_command() -> list[str]:
    """What the head runs."""
    return ["toolrl", "train", f"{CONFIG_FOLDER}/{RUN_FILE}", "--or-resume"]
