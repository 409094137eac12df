"""What of a cluster's description cannot work, found before anything is rendered."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from toolrl.config import RunConfig
from toolrl.errors import Problem

_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")  # Kubernetes' and Compose's names alike
_SECRET = re.compile(r"(?i)(token|secret|passw|api_?key|credential)")
_RAY_ADDRESS = re.compile(r"auto|([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")  # no URL: Ray's client cannot drive a run
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def cluster_problems(config: RunConfig) -> Iterator[Problem]:
    """See the module."""
    cluster, address = config.cluster, config.placement.ray_address
    if address and not _RAY_ADDRESS.fullmatch(address):
        yield Problem(
            "placement.ray_address",
            "must be HOST:PORT of a Ray cluster's head, or auto; `toolrl launch --target ray` submits from outside",
            address,
        )
    names = [group.name for group in cluster.groups]
    for index, group in enumerate(cluster.groups):
        key = f"cluster.groups.{index}"
        if not _LABEL.fullmatch(group.name):
            yield Problem(
                f"{key}.name", "must be lower-case letters, digits and '-', and begin with a letter", group.name
            )
        if names.count(group.name) > 1:
            yield Problem(f"{key}.name", "is given twice; names tell groups apart", group.name)
        for name in ("nodes", "cpus", "memory_gib"):
            if getattr(group, name) < 1:
                yield Problem(f"{key}.{name}", "must be at least 1", getattr(group, name))
        if group.gpus < 0:
            yield Problem(f"{key}.gpus", "must be at least 0", group.gpus)
        if group.hosts and len(group.hosts) != group.nodes:
            yield Problem(f"{key}.hosts", f"must name {group.nodes} machines, as many as `nodes`", group.hosts)
        if names_of := [host for host in group.hosts if not _is_address(host)]:
            yield Problem(f"{key}.hosts", "must be addresses: by its address a machine finds its group", names_of)
    if names and "head" not in names:
        yield Problem("cluster.groups", "needs a group `head`: it holds the driver and the replay buffer", names)
    if names and (heads := [group for group in cluster.groups if group.name == "head" and group.nodes > 1]):
        yield Problem("cluster.groups", "the group `head` is one node", heads[0].nodes)
    for index, mount in enumerate(cluster.mounts):
        if not PurePosixPath(mount.target).is_absolute() or not mount.source:
            yield Problem(
                f"cluster.mounts.{index}", "needs a source, and an absolute target such as /runs", mount.target
            )
    if cluster.gpus_per_node < 1:
        yield Problem("cluster.gpus_per_node", "must be at least 1", cluster.gpus_per_node)
    # YAML makes seconds of 24:00:00.
    if not re.fullmatch(r"(\d+-)?\d+:\d\d:\d\d|[1-9]\d*", cluster.time_limit):
        what = "must be [DAYS-]HOURS:MINUTES:SECONDS, e.g. 24:00:00, or seconds"
        yield Problem("cluster.time_limit", what, cluster.time_limit)
    if not 1 <= cluster.notice_s <= 65535:
        yield Problem("cluster.notice_s", "must be from 1 to 65535 seconds", cluster.notice_s)
    yield from _variables(config)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _variables(config: RunConfig) -> Iterator[Problem]:
    for name in config.cluster.environment:
        if _SECRET.search(name):
            yield Problem(
                f"cluster.environment.{name}",
                "looks like a secret, and a config is stored and shown; list it under cluster.secrets instead",
            )
        elif not _VARIABLE.fullmatch(name):
            yield Problem(f"cluster.environment.{name}", "is no name of an environment variable")
    for index, secret in enumerate(config.cluster.secrets):
        if not _VARIABLE.fullmatch(secret.variable):
            yield Problem(f"cluster.secrets.{index}.variable", "is no name of an environment variable", secret.variable)
