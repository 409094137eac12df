"""More and fewer rollout workers while a run goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import ray

from actors.worker_pool import WorkerPool
from toolrl import placement

log = logging.getLogger(__name__)

FREED_AFTER_S = 3.0  # Ray counts what a worker that left had a moment later


@dataclass(frozen=True)
class Scaled:
    """What a change of the number of workers came to."""

    workers: list[str]  # those at work now
    joined: list[str]
    left: dict[str, int]  # name -> episodes that it handed back


@dataclass
class WorkerScaling:
    """`await scaling.to(n)`; one change at a time, a second waits."""

    pool: WorkerPool

    async def to(self, workers: int, say: Callable[[str], None] = log.info) -> Scaled:
        """Changes the number of workers; `say` hears what is being done.

        Those that leave, the youngest first, hand their episodes back; those that join get the latest weights before
        they take work.

        Raises:
            toolrl.placement.PlacementError: there is no room for so many; names what is missing. Nothing was changed.
            WorkersLost: one did not come up; the others stay.
            ValueError: fewer than one.
        """
        if workers < 1:
            raise ValueError(f"{workers} rollout workers: a run that goes on needs at least 1")
        if self.pool.changing.locked():
            say("waiting for another change of the workers, or the learner's turn, to end")
        async with self.pool.changing:
            pool = self.pool
            more = workers - len(pool.members)
            if more > 0:
                await self._check_room(more)
            pool.wanted = workers
            joining = [pool.new_name() for _ in range(more)]
            leaving = list(pool.members)[workers:]
            if joining:
                say(f"starting {', '.join(joining)}")
                started = await asyncio.gather(*map(pool.add, joining), return_exceptions=True)
                for failure in started:
                    if failure is not None:
                        raise failure
            if leaving:
                say(f"handing over the episodes of {', '.join(leaving)}")
            handed = await asyncio.gather(*map(pool.remove, leaving))
            return Scaled(list(pool.members), joining, dict(zip(leaving, handed, strict=True)))

    async def _check_room(self, more: int) -> None:
        config = self.pool.config
        if config.placement.mode == "colocated":
            raise placement.PlacementError(
                "colocated, each engine shares a GPU with a learner rank, whose number is fixed while a run goes on; "
                "start it with placement.mode=disaggregated to add rollout workers"
            )
        added = replace(config, rollout=replace(config.rollout, workers=more))
        device: placement.Device = "cuda" if self.pool.on_gpu else "cpu"
        until = time.monotonic() + FREED_AFTER_S
        while lacking := placement.missing_for_workers(added, ray.available_resources(), device):
            if time.monotonic() > until:
                raise placement.PlacementError(
                    f"{more} more rollout workers cannot be placed beside what runs:\n"
                    + "\n".join(f"- {line}" for line in lacking)
                )
            await asyncio.sleep(0.2)
