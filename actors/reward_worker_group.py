"""The reward workers of a run, seen from the driver: start, replace, stop.

Invariants:
- One that cannot be started at the beginning is an error at once; nothing has been trained by then.
- Later a dead one is replaced for as long as the run lasts, at longer and longer intervals while it does not come up. Meanwhile
  its rewards wait, and may miss their deadline; the run's end it never is.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.reward_worker import start_reward_worker
from toolrl.errors import RunError, UserError
from toolrl.rewards.prm import PrmOptions

log = logging.getLogger(__name__)

START_DEADLINE_S = 300.0
WORKED_S = 60.0  # one that lived for so long is replaced at once
LONGEST_PAUSE_S = 60.0


class RewardWorkersLost(RunError):
    """A reward worker could not be started at the beginning of the run."""


class RewardWorkerGroup:
    """`await RewardWorkerGroup.start(…)`, then `stop()`; workers are watched in between."""

    def __init__(self, run: str, options: PrmOptions, model_dir: str, buffer: Any) -> None:
        self.run, self.options, self.model_dir, self.buffer = run, options, model_dir, buffer
        self.actors: dict[int, Any] = {}  # at work
        self.replaced = 0
        self._names = itertools.count()
        self._alive: set[Any] = set()  # the starting ones too
        self._keepers: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, run: str, options: PrmOptions, model_dir: str, buffer: Any) -> RewardWorkerGroup:
        """Starts `options.workers` workers.

        Raises:
            UserError: the model cannot be used; says why.
            RewardWorkersLost: one did not come up.
        """
        group = cls(run, options, model_dir, buffer)
        starting = [asyncio.create_task(group._started()) for _ in range(options.workers)]
        try:
            first = await asyncio.gather(*starting)
        except BaseException:
            for each in starting:
                each.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await group.stop()
            raise
        group._keepers = [asyncio.create_task(group._keep(index, actor)) for index, actor in enumerate(first)]
        return group

    def metrics(self) -> dict[str, float]:
        return {"reward_worker/count": float(len(self.actors)), "reward_worker/replaced": float(self.replaced)}

    async def stop(self) -> None:
        """Kills the workers; a reward that is under way is lost, and waits in the buffer's file."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for actor in list(self._alive):
            self._end(actor)

    def _end(self, actor: Any) -> None:
        self._alive.discard(actor)
        ray.kill(actor, no_restart=True)

    async def _started(self) -> Any:
        """A worker whose model is loaded. Nothing is left of one that fails."""
        name = f"{self.run}/reward-{next(self._names)}"
        actor = await asyncio.to_thread(start_reward_worker, name, self.options, self.model_dir, self.buffer)
        self._alive.add(actor)
        try:
            await asyncio.wait_for(_value(actor.start.remote()), START_DEADLINE_S)
        except BaseException as error:
            self._end(actor)
            if isinstance(error, RayTaskError) and isinstance(error.cause, UserError):
                raise error.cause from None
            if isinstance(error, (RayError, TimeoutError)):
                why = str(error) or f"not ready after {START_DEADLINE_S:g} s"
                raise RewardWorkersLost(f"reward worker {name} did not start: {why}") from error
            raise
        return actor

    async def _keep(self, index: int, actor: Any) -> None:
        pause_s = 0.0
        while True:
            started = time.monotonic()
            self.actors[index] = actor
            try:
                await _value(actor.serve.remote())
            except RayError as error:
                log.warning("a reward worker is replaced: %s", type(error).__name__)
            finally:
                del self.actors[index]
                self._end(actor)
            if time.monotonic() - started > WORKED_S:
                pause_s = 0.0
            actor, pause_s = await self._replacement(pause_s)

    async def _replacement(self, pause_s: float) -> tuple[Any, float]:
        """(a worker that came up, how long to wait before the next one if it does not last)."""
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(max(1.0, 2 * pause_s), LONGEST_PAUSE_S)
            try:
                actor = await self._started()
            except (RunError, UserError) as error:
                log.warning("%s", error)
            else:
                self.replaced += 1
                return actor, pause_s


async def _value(ref: Any) -> Any:
    return await ref
