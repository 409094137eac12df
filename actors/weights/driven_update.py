"""The worker's end of an update that the learner drives step by step (`nccl`, `ipc`, `gloo`).

Invariants:
- An engine is not kept waiting for ever: a trainer that falls silent between two steps is given up.
- From the first step to the last nothing else updates this engine, and it does not fall asleep.
- A step that fails ends the update. Before the first `update`, and with `gloo` until `finish`, the old weights stay; later
  there are none until a publication is complete.
- Steps are taken one after the other; `cancel` waits for the one that is under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from actors.engine import UpdateTimes
from actors.weights.driven_payload import writable
from actors.weights.receiver import WeightReceiver


class DrivenUpdate:
    """One per engine, in its worker."""

    def __init__(self, receiver: WeightReceiver, *, prepares: bool, deadline_s: float = 120.0) -> None:
        """`receiver`: what else updates this engine. `prepares`: the transport brings the next weights beside the present ones,
        and they are exchanged in a short pause; else generation pauses from the first step to the last."""
        self.receiver, self.engine = receiver, receiver.engine
        self.prepares = prepares
        self.deadline_s = deadline_s  # a trainer that is silent for so long in the middle is given up
        self._step = asyncio.Lock()
        self._held: AsyncExitStack | None = None  # what lasts as long as the update
        self._giving_up: asyncio.Task[None] | None = None
        self._begun = self._touched = False  # there is something to refuse; the weights are not the old ones any more
        self._until = 0.0  # when the learner gives the update up
        self._started = self._paused = 0.0

    async def step(self, name: str, argument: Any = None) -> dict[str, float] | None:
        """`probe`; `connect` takes the group's settings, `start` the seconds to the deadline, `update` a payload, `finish` the
        version, whose answer is what the update took; `cancel` the reason.

        Raises:
            WeightsRefused, UpdateFailed, EngineDied: the update is over for this engine.
            ValueError: no such step.
        """
        if name == "probe":
            await self.engine.check()
            await self.engine.answer()
            return None
        async with self._step:
            if self._giving_up is not None:
                self._giving_up.cancel()
            try:
                return await self._take(name, argument)
            except BaseException as error:
                await self._end(f"step {name!r} failed: {error}")
                raise
            finally:
                if self._held is not None:
                    self._giving_up = asyncio.create_task(self._give_up())

    async def _take(self, name: str, argument: Any) -> dict[str, float] | None:
        if name == "connect":
            await self.engine.connect_trainer(argument)
        elif name == "start":
            await self._begin(float(argument))
        elif name == "update":
            await self._update(argument)
        elif name == "finish":
            return await self._finish(int(argument))
        elif name == "cancel":
            await self._end(str(argument))
        else:
            raise ValueError(f"engine {self.engine.name}: {name!r} is no step of a weight update")
        return None

    async def _begin(self, within_s: float) -> None:
        self._started, self._until = time.monotonic(), time.monotonic() + within_s
        self._held, self._begun, self._touched = AsyncExitStack(), False, False
        await self._held.enter_async_context(self.receiver.updating)
        await self._held.enter_async_context(self.engine.updating)
        if not self.prepares:
            self._paused = time.monotonic()
            await self._held.enter_async_context(self.engine.paused())
            await self.engine.begin_update()
            self._begun = True

    async def _update(self, payload: Mapping[str, Any]) -> None:
        if self.prepares:
            await self.engine.prepare(payload)
            self._begun = True
        else:
            self._touched = True
            await self.engine.transfer(writable(payload, max(0.0, self._until - time.monotonic())))

    async def _finish(self, version: int) -> dict[str, float]:
        before = time.monotonic()
        self._touched = True
        if self.prepares:
            times = await self.engine.swap(version)
            times = UpdateTimes(before - self._started, times.pause_s, times.load_s, times.resume_s)
        else:
            await self.engine.finish_update(version)
            loaded = time.monotonic()
            times = UpdateTimes(0.0, 0.0, loaded - self._paused, 0.0)
        await self._let_go()
        return {"version": version, "prepare_s": times.prepare_s, "paused_s": times.paused_s, "load_s": times.load_s}

    async def _give_up(self) -> None:
        await asyncio.sleep(self.deadline_s)
        async with self._step:
            self._giving_up = None
            await self._end(f"their trainer was silent for {self.deadline_s:g} s in the middle of an update")

    async def _end(self, why: str) -> None:
        """Without new weights."""
        if self._held is None:
            return
        try:
            if self._touched:
                await self.engine.abandon_update(why)
            elif self._begun:
                await self.engine.refuse(why)
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await held.aclose()
