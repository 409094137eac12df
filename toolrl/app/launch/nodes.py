"""The nodes of a cluster: as described, or derived from what the run's parts need."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

from toolrl import placement
from toolrl.config import RunConfig
from toolrl.config_cluster import GroupConfig
from toolrl.errors import UserError

HEAD = GroupConfig(name="head", nodes=1, cpus=4, memory_gib=16)
CPUS_PER_GPU, GIB_PER_GPU = 8, 64
SANDBOX_CPUS, SANDBOX_GIB = 16, 32


def groups(config: RunConfig) -> list[GroupConfig]:
    """Every group, the head first. Raises UserError where described ones do not hold the run."""
    found = list(config.cluster.groups) or list(_derived(config))
    ordered = sorted(found, key=lambda group: group.name != "head")
    wanted = placement.needed(config, device(config))
    lacking = placement.missing(wanted, resources(ordered))
    lacking += placement.too_large(wanted, max(group.gpus for group in ordered))
    if lacking:
        raise UserError("cluster.groups do not hold the run:\n" + "\n".join(f"- {line}" for line in lacking))
    return ordered


def device(config: RunConfig) -> placement.Device:
    """Where `auto` leads on this cluster."""
    gpus = sum(group.nodes * group.gpus for group in config.cluster.groups)
    return placement.resolve_device(config, {"GPU": gpus if config.cluster.groups else 0})


def resources(found: list[GroupConfig]) -> dict[str, float]:
    """What Ray will have, by its names."""
    total = {"CPU": 0.0, "GPU": 0.0, "sandbox": 0.0}
    for group in found:
        there = {"CPU": group.cpus, "GPU": group.gpus, **ray_resources(group)}
        for name in total:
            total[name] += group.nodes * there.get(name, 0)
    return total


def ray_resources(group: GroupConfig) -> dict[str, float]:
    """Custom resources of a node: the group's name, and a unit of `sandbox` on sandbox nodes."""
    own = {"sandbox": 1.0} if group.name == "sandbox" else {f"group-{group.name}": 1.0}
    return own | dict(group.resources)


def ray_flags(group: GroupConfig) -> list[str]:
    """Of `ray start`, beside the address."""
    return [
        f"--num-cpus={group.cpus}",
        f"--num-gpus={group.gpus}",
        f"--resources={json.dumps(ray_resources(group), separators=(',', ':'))}",
    ]


def _derived(config: RunConfig) -> Iterator[GroupConfig]:
    """A group a part: GPUs in whole nodes, processors as asked, interpreters apart."""
    yield replace(HEAD)
    plan = placement.needed(config, placement.resolve_device(config, {}))
    parts = {part.name: part for part in plan.parts}
    workers, ranks = parts["rollout worker"], parts["learner rank"]
    if plan.device == "cpu":
        yield _on_processors("learner", ranks)
        yield _on_processors("rollout", workers)
    elif plan.mode == "colocated":
        yield _on_gpus("gpu", plan.total()["GPU"], config.cluster.gpus_per_node)
    else:
        yield _on_gpus("learner", ranks.count * ranks.gpus, config.cluster.gpus_per_node)
        yield _on_gpus("rollout", workers.count * workers.gpus * config.engine.nodes, config.cluster.gpus_per_node)
    if "sandbox host" in parts:
        hosts = config.placement.sandbox_hosts
        yield GroupConfig(name="sandbox", nodes=hosts, cpus=SANDBOX_CPUS, memory_gib=SANDBOX_GIB)


def _on_processors(name: str, part: placement.Part) -> GroupConfig:
    cpus = max(1, math.ceil(part.count * part.cpus))
    return GroupConfig(name=name, nodes=1, cpus=cpus, memory_gib=max(2, math.ceil(part.count * part.memory_gib)))


def _on_gpus(name: str, gpus: float, per_node: int) -> GroupConfig:
    each = min(per_node, math.ceil(gpus))
    nodes = math.ceil(gpus / each)
    return GroupConfig(name=name, nodes=nodes, cpus=each * CPUS_PER_GPU, memory_gib=each * GIB_PER_GPU, gpus=each)
