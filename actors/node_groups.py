"""Which nodes a part of the run belongs on: those of its group, where the cluster has such a group, and packed together.

`toolrl launch` starts every node with a Ray resource `group-NAME`; a cluster without them (a laptop, somebody else's cluster)
leaves the choice to Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from toolrl.placement import Part, Placement, PlacementError

A_PLACE = 0.001  # of a group's resource: it binds to the node and never runs out
PLACED_WITHIN_S = 10.0


def group_resources(name: str) -> dict[str, float]:
    """What an actor asks for to be on a node of this group; nothing where the cluster has no such group."""
    resource = f"group-{name}"
    return {resource: A_PLACE} if resource in ray.cluster_resources() else {}


async def packed(what: str, count: int, each: dict[str, float], *, within_s: float = PLACED_WITHIN_S) -> PlacementGroup:
    """Places for `count` actors, on as few nodes as hold them.

    Raises:
        PlacementError: they are not there in time; says what is wanted and what is free.
    """
    wanted = {name: amount for name, amount in each.items() if amount}
    group = placement_group([wanted or {"CPU": A_PLACE}] * count, strategy="PACK")
    try:
        await asyncio.wait_for(_ready(group), within_s)
    except TimeoutError:
        remove_placement_group(group)
        free = ", ".join(
            f"{name} {amount:g}" for name, amount in sorted(ray.available_resources().items()) if name in wanted
        )
        raise PlacementError(
            f"no room for {count} × {what}, each with {', '.join(f'{name} {amount:g}' for name, amount in wanted.items())}: "
            f"after {within_s:g} s free in the whole cluster are {free or 'none of these'}; add nodes, or lower the number"
        ) from None
    return group


async def fits(plan: Placement, *, within_s: float = PLACED_WITHIN_S) -> None:
    """Holds a place for every part of the run at once, and lets them go again: what fits the sum of all nodes may still fit no
    single one. Where engines share the learner's GPUs, the learner's own places hold both, and are asked for when it starts.

    Raises:
        PlacementError: see `packed`; says what each node has free.
    """
    parts = [(part, _bundle(part)) for part in plan.parts]
    wanted = [bundle for part, bundle in parts if bundle for _ in range(part.count)]
    if plan.mode == "colocated" or not wanted:
        return
    group = placement_group(wanted, strategy="PACK")
    try:
        await asyncio.wait_for(_ready(group), within_s)
    except TimeoutError:
        asked = "; ".join(f"{part.count} × {part.name} with {_said(bundle)}" for part, bundle in parts if bundle)
        free = "; ".join(
            f"{node['NodeManagerAddress']}: {_said(node['Resources'])}" for node in ray.nodes() if node["Alive"]
        )
        raise PlacementError(
            f"the parts of the run fit no nodes after {within_s:g} s. Wanted: {asked}. There are: {free}. "
            "Another run may hold them; add nodes, larger ones, lower the numbers, or spread an engine over several nodes "
            "(engine.nodes)"
        ) from None
    finally:
        remove_placement_group(group)


def _bundle(part: Part) -> dict[str, float]:
    group = group_resources(_GROUPS[part.name]) if part.name in _GROUPS else {}
    asked = {"CPU": part.cpus, "GPU": part.gpus, "sandbox": part.sandbox}
    found = {name: amount for name, amount in asked.items() if amount}
    return found | group if found else {}


# Parts by their names in `toolrl.placement`.
_GROUPS = {"rollout worker": "rollout", "engine node": "rollout", "learner rank": "learner"}


def _said(resources: Mapping[str, float]) -> str:
    shown = {
        name: amount for name, amount in resources.items() if name in ("CPU", "GPU", "sandbox") or "group-" in name
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(shown.items())) or "nothing"


async def _ready(group: PlacementGroup) -> Any:
    return await group.ready()


def place(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    """The scheduling strategy of the actor that takes one of the places."""
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


__all__ = ["PlacementGroup", "fits", "group_resources", "packed", "place", "remove_placement_group"]
