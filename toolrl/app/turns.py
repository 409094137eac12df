"""Whose turn it is where engines and learner share their memory (`placement.mode=colocated`).

        engines: awake, they generate                     learner: it trains, reads, saves
        its weights lie beside, the rest is on the host   engines sleep: no weights, no cache
                            │                                            │
                            └── learner(): engines sleep, it takes room ─►
                            ◄─ engines(): it makes room, their weights' memory, publication, their cache ─┘

Invariants:
- Engines generate in their turn only, the learner computes in its own only. Nobody takes memory before the other has given it
  up: the cache comes last, so there is never more than both sets of weights beside what one of them needs.
- A turn begins when somebody needs it, not when the other's ends: a step that is followed by a checkpoint, a guard's remedy or
  the end wakes no engine for it.
- Engines begin their turn with the version that was last announced, whatever they had before they slept.

Everybody who needs engines or learner asks for the turn first (`toolrl.app.progress`, `toolrl.app.train`). With memory of their
own (`disaggregated`) both always have it, and asking costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Literal

from actors.learner_group import LearnerGroup
from actors.worker_pool import WorkerPool


class Turns:
    """The engines begin. A turn that could not be changed ends the run: nobody knows then who holds which memory."""

    def __init__(self, learner: LearnerGroup, workers: WorkerPool, *, shared: bool) -> None:
        """`shared`: one memory for both."""
        self.shared = shared
        self.whose: Literal["engines", "learner"] = "engines"
        self._learner, self._workers = learner, workers
        self._spent: dict[str, float] = {}

    async def learner(self) -> None:
        """From here on the learner may work, until the engines' turn."""
        if not self.shared or self.whose == "learner":
            return
        started = time.monotonic()
        await self._workers.sleep()
        await self._learner.take_room()
        self.whose = "learner"
        self._add("time/sleep_s", time.monotonic() - started)

    async def engines(self, publish: Callable[[], Awaitable[None]]) -> None:
        """From here on engines generate, until the learner's turn. `publish` gives them the weights, where they slept."""
        if not self.shared or self.whose == "engines":
            return
        started = time.monotonic()
        await self._learner.make_room()
        await self._workers.wake_weights()
        woken = time.monotonic()
        await publish()
        published = time.monotonic()
        await self._workers.wake_cache()
        self.whose = "engines"
        self._add("time/publish_s", published - woken)
        self._add("time/wake_s", woken - started + time.monotonic() - published)

    def spent(self) -> dict[str, float]:
        """Seconds since it was last asked, by metric; nothing where there are no turns."""
        found, self._spent = self._spent, {}
        return found

    def _add(self, metric: str, seconds: float) -> None:
        self._spent[metric] = self._spent.get(metric, 0.0) + seconds
