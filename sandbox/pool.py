"""Keeps boxes warm and hands them out.

Invariants:
- A box is handed out only after a reset that answered `clean`; any doubt destroys it.
- Nothing waits without a deadline, nothing is created under a lock, and creation that keeps failing is refused at
  once for a while.
- `close` leaves no box behind.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import time
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from sandbox.available import make_backend
from sandbox.backend import Backend, Box, expired
from sandbox.breaker import Breaker
from sandbox.channel import ChannelClosed
from sandbox.config import SandboxConfig
from sandbox.result import PoolExhausted, SandboxError, SandboxUnavailable
from sandbox.session import Session
from sandbox.stats import PoolStats

logger = logging.getLogger(__name__)
_RESET_DEADLINE_S = 10.0


class SandboxPool:
    """`async with SandboxPool(SandboxConfig(...)) as pool: session = await pool.acquire(episode_id="e1")`."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self.run_slots = asyncio.Semaphore(self.config.concurrent_runs)
        self._backend: Backend | None = None
        self._idle: collections.deque[Box] = collections.deque()  # the last used on the right, handed out first
        self._idle_since: dict[Box, float] = {}
        self._waiters: collections.deque[asyncio.Future[Box]] = collections.deque()
        self._boxes: set[Box] = set()  # all that live, whatever they do
        self._resetting = 0
        self._creating = 0
        self._creators = max(os.cpu_count() or 1, 2)
        self._breaker = Breaker(self.config.breaker_failures, self.config.breaker_cooldown_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()  # destructions: waited for, never cancelled
        self.counts = PoolStats()
        self._closing = False

    async def __aenter__(self) -> SandboxPool:
        backend, why = await asyncio.to_thread(make_backend, self.config)
        self._backend, self.counts.backend = backend, backend.name
        logger.info("sandbox backend %s: %s", backend.name, why)
        try:
            self._creating += self.config.min_sessions
            await asyncio.gather(*(self._create() for _ in range(self.config.min_sessions)))
            if self.config.min_sessions and not self._boxes:
                raise SandboxUnavailable(self._breaker.last_failure)
        except BaseException:
            await self.close()
            raise
        self._start(self._heartbeat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def acquire(self, *, episode_id: str, deadline_s: float | None = None, seed: int | None = None) -> Session:
        """A session on a clean box. `seed` seeds `random` and a preimported numpy before the first cell.

        Raises PoolExhausted, SandboxUnavailable.
        """
        start = time.monotonic()
        box = await self.take_box(self.config.acquire_deadline_s if deadline_s is None else deadline_s)
        self.counts.acquired += 1
        return Session(self, box, episode_id, seed, time.monotonic() - start)

    def stats(self) -> PoolStats:
        """A copy of the counters."""
        in_use = len(self._boxes) - len(self._idle) - self._resetting
        return self.counts.copy(
            idle=len(self._idle),
            in_use=in_use,
            resetting=self._resetting,
            creating=self._creating,
            waiting=len(self._waiters),
        )

    async def close(self) -> None:
        """Destroy every box. Sessions that are still held get SandboxError or `infra_error`."""
        self._closing = True
        self._fail_waiters("the pool is closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        boxes, self._boxes = list(self._boxes), set()
        self._idle.clear()
        await asyncio.gather(*(box.destroy() for box in boxes), *self._ending)
        if self._backend is not None:
            await self._backend.close()

    # What sessions call.

    async def take_box(self, deadline_s: float) -> Box:
        """An idle box, or the next that is free or made. Raises PoolExhausted, SandboxUnavailable."""
        if self._closing or self._backend is None:
            raise SandboxUnavailable("the pool is not open")
        while self._idle:
            box = self._idle.pop()
            if box.channel.open:
                box.uses += 1
                return box
            self.discard(box)
        if not self._boxes and not self._creating and self._breaker.open:
            raise SandboxUnavailable(f"creating boxes keeps failing: {self._breaker.last_failure}")
        if len(self._waiters) >= self.config.max_waiters:
            raise PoolExhausted(
                f"{len(self._waiters)} others wait for a box already; raise max_sessions or max_waiters"
            )
        return await self._wait_for_box(deadline_s)

    async def _wait_for_box(self, deadline_s: float) -> Box:
        waiter: asyncio.Future[Box] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._grow()
        try:
            async with asyncio.timeout(deadline_s):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._offer(waiter.result(), used=False)  # it came at the moment of giving up
            if isinstance(error, TimeoutError):
                raise PoolExhausted(
                    f"no box within {deadline_s:g} s: {len(self._boxes)} of {self.config.max_sessions} in use; "
                    f"last failure: {self._breaker.last_failure or 'none'}"
                ) from None
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)

    def give_back(self, box: Box) -> None:
        """A session is done with a box: reset it in the background."""
        if self._closing:
            return
        self._resetting += 1
        self._start(self._reset(box))

    def discard(self, box: Box) -> None:
        """A box is dead or not to be trusted: destroy it in the background and see to a replacement."""
        if box not in self._boxes:
            return
        self._boxes.discard(box)
        self._idle_since.pop(box, None)
        self.counts.destroyed += 1
        self._start(box.destroy(), self._ending)
        self._grow()

    # The inside.

    def _start(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]] | None = None) -> None:
        among = self._tasks if among is None else among
        task = asyncio.create_task(work)
        among.add(task)
        task.add_done_callback(among.discard)

    def _offer(self, box: Box, used: bool = True) -> None:
        if not used:
            box.uses -= 1
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                box.uses += 1
                waiter.set_result(box)
                return
        self._idle.append(box)
        self._idle_since[box] = time.monotonic()

    def _grow(self) -> None:
        """Create what waiters need and the minimum asks for, as far as the maximum lets."""
        if self._closing or self._breaker.open:
            return
        wanted = max(len(self._waiters) - self._resetting, self.config.min_sessions - len(self._boxes))
        room = self.config.max_sessions - len(self._boxes) - self._creating
        # No more at once than there are cores: they would hold each other up, and by then fewer may be needed.
        for _ in range(min(wanted - self._creating, room, self._creators - self._creating)):
            self._creating += 1  # now, not when the task comes to run: this may be called again before
            self._start(self._create())

    async def _create(self) -> None:
        """Make one box; `_creating` counts it already."""
        assert self._backend is not None
        try:
            box = await self._backend.create()
        except SandboxError as error:
            self._creation_failed(str(error))
            return
        finally:
            self._creating -= 1
        self._breaker.succeeded()
        self.counts.created += 1
        self._boxes.add(box)
        box.channel.on_closed = lambda: self._ended(box)
        self._offer(box)
        self._grow()

    def _fail_waiters(self, why: str) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(SandboxUnavailable(why))

    def _ended(self, box: Box) -> None:
        """A box ended by itself: if it was idle, replace it now; otherwise its user finds out."""
        if box in self._idle and not self._closing:
            self._idle.remove(box)
            self.discard(box)

    def _creation_failed(self, why: str) -> None:
        self.counts.create_failures += 1
        delay_s = self._breaker.failed(why)
        logger.warning("creating a box failed (again in %.1f s): %s", delay_s, why)
        if self._closing:
            return
        if self._breaker.open and not self._boxes:  # nobody who waits can be served by a release
            self._fail_waiters(f"creating boxes keeps failing: {why}")
        asyncio.get_running_loop().call_later(delay_s + 0.01, self._grow)

    async def _reset(self, box: Box) -> None:
        clean = False
        try:
            if not expired(box, self.config):
                frame = await box.channel.request({"op": "reset"}, deadline_s=_RESET_DEADLINE_S)
                clean = frame.header.get("clean") is True
                if not clean:
                    self.counts.unclean += 1
                    logger.info("box %s is not clean: %s", box.name, frame.header.get("leftovers"))
        except (ChannelClosed, TimeoutError) as error:
            logger.info("box %s could not be reset: %s", box.name, error)
        finally:
            self._resetting -= 1
        if clean and not self._closing:
            self._offer(box)
        else:
            self.discard(box)

    async def _heartbeat(self) -> None:
        """Tell every box that its owner lives (one that is busy hears it when it is done), and let go of what is not
        needed."""
        assert self._backend is not None
        while True:
            self._start(self._backend.tidy())
            await asyncio.sleep(min(self.config.ttl_s, self.config.idle_s) / 4)
            for box in list(self._boxes):
                with contextlib.suppress(ChannelClosed):
                    box.channel.send({"op": "ping"})
            while len(self._boxes) > self.config.min_sessions and self._idle:
                if time.monotonic() - self._idle_since[self._idle[0]] < self.config.idle_s:
                    break
                self.discard(self._idle.popleft())
