"""One sandbox host as a rollout worker sees it: calls that end when the host does, and how busy it is.

Invariant: a call ends as soon as the host is known to be lost, whoever found out; nothing waits for a host that is dead
or silent.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from ray.exceptions import RayError, RayTaskError

from actors.sandbox_host import Load
from sandbox import SandboxError, SandboxUnavailable

BEAT_S = 1.0
SILENT_S = 5.0  # a beat without an answer for so long is a miss …
MISSES = 2  # … and so many in a row are the end (one may be the worker's own busy loop)
SHUNNED_S = 5.0


class HostLost(SandboxUnavailable):
    """The host died, or fell silent."""


class HostLink:
    """`follow()` keeps it alive; `call()` uses it."""

    def __init__(self, name: str, actor: Any, owner: str) -> None:
        self.name = name
        self.actor = actor
        # New with every link: a host that was silent and comes back knows the sessions of the old one by their owner.
        self.owner = f"{owner}/{uuid.uuid4().hex[:8]}"
        self.load: Load | None = None  # None: it has not answered yet
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._shunned_until = 0.0

    @property
    def usable(self) -> bool:
        return self.load is not None and not self.lost.done()

    @property
    def has_room(self) -> bool:
        return self.usable and self.load is not None and self.load.has_room

    def rank(self) -> tuple[bool, float]:
        """The least is the best choice."""
        return time.monotonic() < self._shunned_until, self.load.share if self.load else 1.0

    def shun(self) -> None:
        """It could not make a box: others are better for a while."""
        self._shunned_until = time.monotonic() + SHUNNED_S

    def count(self, change: int) -> None:
        """A session more or less, until the host itself says how many it has."""
        if self.load is not None:
            self.load = Load(max(self.load.sessions + change, 0), self.load.capacity)

    def lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)

    async def follow(self) -> str:
        """Beats until the host is lost; returns why."""
        misses = 0
        while not self.lost.done():
            try:
                async with asyncio.timeout(SILENT_S):
                    self.load = await self.call("beat", self.owner)
                misses = 0
            except TimeoutError:
                misses += 1
                if misses == MISSES:
                    self.lose(f"sandbox host {self.name} was silent for {MISSES * SILENT_S:g} s")
            except HostLost:
                break
            await asyncio.wait([self.lost], timeout=BEAT_S)
        return self.lost.result()

    def send(self, method: str, *arguments: Any) -> None:
        """A call whose end nobody waits for."""
        if not self.lost.done():
            getattr(self.actor, method).remote(*arguments)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Raises HostLost, and the SandboxError that the host raised."""
        if self.lost.done():
            raise HostLost(self.lost.result())
        reply = asyncio.ensure_future(_value(getattr(self.actor, method).remote(*arguments)))
        try:
            await asyncio.wait([reply, self.lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not reply.done():
                reply.cancel()
        if not reply.done() or reply.cancelled():
            raise HostLost(self.lost.result())
        try:
            return reply.result()
        except RayTaskError as error:
            if isinstance(error.cause, SandboxError):
                raise error.cause from None
            raise
        except RayError as error:  # the actor, its node or its answer is gone
            self.lose(f"sandbox host {self.name} died: {type(error).__name__}")
            raise HostLost(self.lost.result()) from error


async def _value(ref: Any) -> Any:
    return await ref
