"""Where engines go: a worker's place is taken before it starts and given back when it has ended.

- An engine on one node needs no reservation: Ray gives an actor's processors and GPUs on one node, of the group `rollout` where
  the cluster has one.
- An engine over several nodes has a placement group of its own, one bundle a node, as close together as they are to be had.
- An engine that shares a GPU with a learner rank goes where that rank is: into the other half of its bundle, which is one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actors.node_groups import PLACED_WITHIN_S, PlacementGroup, packed, remove_placement_group
from toolrl.config import RunConfig
from toolrl.placement import gpus_of_a_node, takes_turns


@dataclass(frozen=True)
class EnginePlace:
    """A bundle of a placement group. `whole`: the group is this engine's, its other bundles those of its further nodes."""

    group: PlacementGroup
    index: int
    whole: bool


class EnginePlaces:
    """Those of one run."""

    def __init__(
        self, config: RunConfig, *, on_gpu: bool, resources: Mapping[str, float], ranks: PlacementGroup | None = None
    ) -> None:
        """`resources`: of the nodes that engines belong on. `ranks`: the learner's bundles, where they are shared."""
        self._nodes = config.engine.nodes
        self._bundle = {
            "CPU": 1.0 if on_gpu else float(config.engine.cpu_threads),
            "GPU": gpus_of_a_node(config.engine) if on_gpu else 0.0,
            **resources,
        }
        self._ranks = ranks if on_gpu and takes_turns(config) else None
        self._taken: dict[str, EnginePlace] = {}

    async def take(self, name: str, *, within_s: float = PLACED_WITHIN_S) -> EnginePlace | None:
        """The worker's place; None: wherever there is room.

        Raises:
            PlacementError: there is none in time; says what is wanted and what is free.
        """
        if self._ranks is not None:
            used = {place.index for place in self._taken.values()}
            free = next(index for index in range(len(used) + 1) if index not in used)
            self._taken[name] = EnginePlace(self._ranks, free, whole=False)
        elif self._nodes > 1:
            group = await packed(f"node of engine {name}", self._nodes, self._bundle, within_s=within_s)
            self._taken[name] = EnginePlace(group, 0, whole=True)
        return self._taken.get(name)

    def give_back(self, name: str) -> None:
        """After the worker's end; nothing where it had no place."""
        place = self._taken.pop(name, None)
        if place is not None and place.whole:
            remove_placement_group(place.group)
