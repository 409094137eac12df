"""The places of a rollout worker: how many episodes run at once, and who gets a place that is free.

Invariants:
- No more than `total` episodes hold a place. One that waits long for a tool is parked: it gives its place up, and what it
  does not use of its tools' resources with it.
- A free place goes to the parked episodes whose wait is over, in the order in which that happened; then to those that
  wait to begin, in theirs. No ticket is taken while anybody waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Parkable(Protocol):
    """What holds resources of an episode."""

    async def park(self) -> None: ...
    def unpark(self) -> None: ...


class Slots:
    """`async with slots.slot() as slot`, then `slot.wait(...)` for whatever may take long."""

    def __init__(self, total: int, park_after_s: float) -> None:
        self.total = total
        self.park_after_s = park_after_s
        self.held = 0
        self.parked = 0  # episodes whose wait is not over
        self._returning: deque[asyncio.Future[None]] = deque()
        self._beginning: deque[asyncio.Future[None]] = deque()
        self._changed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Episodes without a place that want one now."""
        return len(self._returning) + len(self._beginning)

    def has_room(self, episodes: int) -> bool:
        """Whether so many may begin. When nothing runs, any number may: they begin as there is room."""
        wanted = self.held + self.waiting
        return wanted == 0 or wanted + episodes <= self.total

    async def room(self, episodes: int, timeout_s: float) -> bool:
        """Waits until so many may begin, at most `timeout_s`; whether they may."""
        end = asyncio.get_running_loop().time() + timeout_s
        while not self.has_room(episodes):
            self._changed.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self._changed.wait()
            except TimeoutError:
                return self.has_room(episodes)
        return True

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Slot]:
        """A place, as soon as one is free."""
        await self.take(self._beginning)
        slot = Slot(self)
        try:
            yield slot
        finally:
            if slot.held:
                self.give()

    async def take(self, queue: deque[asyncio.Future[None]] | None = None) -> None:
        """A place; without a queue, that of those that return from a wait."""
        queue = self._returning if queue is None else queue
        if self.held < self.total and not self.waiting:
            self.held += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give()  # it came at the moment of giving up
            else:
                queue.remove(turn)
            raise

    def give(self) -> None:
        """A place is free: to whoever waits for one, or to new tickets."""
        self.held -= 1
        while self.held < self.total and self.waiting:
            turn = (self._returning or self._beginning).popleft()
            if not turn.done():
                self.held += 1
                turn.set_result(None)
        self._changed.set()


class Slot:
    """One episode's place. Made by `Slots.slot`."""

    def __init__(self, slots: Slots) -> None:
        self.held = True
        self.parked_s = 0.0  # waited without a place, the wait for a new one included
        self._slots = slots

    async def wait(self, work: Coroutine[Any, Any, T], resources: Parkable) -> T:
        """What `work` returns; the place is given up while it takes longer than `park_after_s`."""
        task = asyncio.create_task(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._slots.park_after_s)
            if not done:
                await self._parked(task, resources)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        return task.result()

    async def _parked(self, task: asyncio.Task[Any], resources: Parkable) -> None:
        slots, since = self._slots, time.monotonic()
        self.held = False
        slots.give()
        slots.parked += 1
        try:
            await resources.park()
            await asyncio.wait({task})
        finally:
            slots.parked -= 1
        await slots.take()
        self.held = True
        resources.unpark()
        self.parked_s += time.monotonic() - since
