"""A sandbox host: a Ray actor that owns a `SandboxPool` on its node and keeps sessions for the rollout workers.

Invariants:
- A session belongs to an owner, and an owner that has not been heard for `lease_s` loses all of its sessions: a worker that
  vanished holds nothing.
- The caller names a session before it has one, so that it can be released at any moment, while it is still waited for too.
- The host dies with the driver, and its boxes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

import ray

from sandbox import RunResult, SandboxConfig, SandboxError, SandboxFile, SandboxPool, Session

log = logging.getLogger(__name__)

RESOURCE = "sandbox"  # of Ray: a node offers one unit for each host that it takes
LEASE_S = 30.0
REMEMBERED = 4096  # releases that came for a session not known (yet)
WAITING_CALLS = 8192  # calls under way in one host: runs, and acquires up to the pool's own bound


class SessionGone(SandboxError):
    """The host knows no such session: its lease ran out, or it was released."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a host is: sessions held or waited for, of those it can have at once."""

    sessions: int
    capacity: int

    @property
    def share(self) -> float:
        return self.sessions / self.capacity

    @property
    def has_room(self) -> bool:
        return self.sessions < self.capacity


@dataclass
class _Held:
    owner: str
    taking: asyncio.Task[Session]
    runs: dict[int, asyncio.Task[RunResult]] = field(default_factory=dict)

    def session(self, session_id: str) -> Session:
        if not self.taking.done():
            raise SessionGone(f"session {session_id} has not been given yet")
        return self.taking.result()


class SandboxHost:
    """The actor's body. `start()`, then sessions; `serve()` lasts as long as the host."""

    def __init__(self, name: str, config: SandboxConfig, lease_s: float = LEASE_S) -> None:
        self.name = name
        self.pool = SandboxPool(config)
        self.lease_s = lease_s
        self._held: dict[str, _Held] = {}
        self._released_first: dict[str, None] = {}  # Ray may let a release overtake its acquire
        self._heard: dict[str, float] = {}  # owner -> time.monotonic()
        self._started = False
        self._stopped = asyncio.Event()

    async def start(self) -> dict[str, Any]:
        """Opens the pool; returns what a person wants to know. Raises SandboxUnavailable."""
        await self.pool.__aenter__()
        self._leases = asyncio.create_task(self._watch_leases())
        self._started = True
        return {"host": self.name, "node": ray.get_runtime_context().get_node_id(), "pid": os.getpid()}

    async def serve(self) -> None:
        """Returns after `stop`; fails with the host."""
        await self._stopped.wait()

    async def stop(self) -> None:
        if self._started:
            self._leases.cancel()
        await self.pool.close()
        self._stopped.set()

    # Leases --------------------------------------------------------------------------------------------------------

    async def beat(self, owner: str) -> Load | None:
        """The owner lives and keeps its sessions. None: the host is still starting."""
        self._heard[owner] = time.monotonic()
        return self._load() if self._started else None

    def _load(self) -> Load:
        return Load(len(self._held), self.pool.config.max_sessions)

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / 4)
            oldest = time.monotonic() - self.lease_s
            for owner in [owner for owner, heard in self._heard.items() if heard < oldest]:
                log.warning("host %s: %s is silent; its sessions are released", self.name, owner)
                await self.leave(owner)

    async def leave(self, owner: str) -> None:
        """The owner is done: its sessions are released."""
        self._heard.pop(owner, None)
        theirs = [session_id for session_id, held in self._held.items() if held.owner == owner]
        await asyncio.gather(*(self.release(session_id) for session_id in theirs))

    # Sessions ------------------------------------------------------------------------------------------------------

    async def acquire(
        self, owner: str, session_id: str, episode_id: str, deadline_s: float | None, seed: int | None
    ) -> Load:
        """Takes a box for `session_id`. Raises PoolExhausted, SandboxUnavailable, SessionGone (released meanwhile)."""
        self._heard[owner] = time.monotonic()
        if session_id in self._released_first:
            raise SessionGone(f"session {session_id} was released before it began")
        taking = asyncio.create_task(self.pool.acquire(episode_id=episode_id, deadline_s=deadline_s, seed=seed))
        self._held[session_id] = _Held(owner, taking)
        await asyncio.wait([taking])
        if taking.cancelled():
            raise SessionGone(f"session {session_id} was released while it waited for a box")
        if taking.exception() is not None:
            self._held.pop(session_id, None)
        taking.result()
        return self._load()

    async def run(self, session_id: str, number: int, code: str, timeout_s: float | None) -> RunResult:
        """Runs one cell; `number` names it for `cancel`. Raises SessionGone."""
        held = self._find(session_id)
        running = asyncio.create_task(held.session(session_id).run(code, timeout_s))
        held.runs[number] = running
        try:
            await asyncio.wait([running])
        finally:
            held.runs.pop(number, None)
        if running.cancelled():
            raise SessionGone(f"run {number} of session {session_id} was cancelled")
        return running.result()

    async def cancel(self, session_id: str, number: int) -> None:
        """Ends a run that nobody waits for any more; its box is reset before reuse."""
        held = self._held.get(session_id)
        if held is not None and number in held.runs:
            held.runs[number].cancel()

    async def put(self, session_id: str, name: str, data: bytes) -> None:
        await self._find(session_id).session(session_id).put(name, data)

    async def get(self, session_id: str, name: str) -> bytes:
        return await self._find(session_id).session(session_id).get(name)

    async def files(self, session_id: str) -> list[SandboxFile]:
        return await self._find(session_id).session(session_id).files()

    async def release(self, session_id: str) -> None:
        """Gives the box back, whatever the session does. One that is not there is no error."""
        held = self._held.pop(session_id, None)
        if held is None:
            self._released_first[session_id] = None
            while len(self._released_first) > REMEMBERED:
                del self._released_first[next(iter(self._released_first))]
            return
        if not held.taking.done():
            held.taking.cancel()
            await asyncio.wait([held.taking])
        if held.runs:
            for running in held.runs.values():
                running.cancel()
            await asyncio.wait(list(held.runs.values()))
        with contextlib.suppress(asyncio.CancelledError, SandboxError):
            await held.taking.result().release()

    def _find(self, session_id: str) -> _Held:
        try:
            return self._held[session_id]
        except KeyError:
            raise SessionGone(f"host {self.name} holds no session {session_id}: its lease ran out") from None

    async def stats(self) -> dict[str, Any]:
        """The pool's counters, with the sessions held for workers and the number of their owners."""
        owners = {held.owner for held in self._held.values()}
        return {"host": self.name, **vars(self.pool.stats()), "sessions": len(self._held), "owners": len(owners)}


def start_sandbox_host(name: str, config: SandboxConfig, *, lease_s: float = LEASE_S, cpus: float = 1.0) -> Any:
    """Creates the actor under `name` on a node with the resource `sandbox`; the caller awaits its `start`."""
    actor = ray.remote(SandboxHost).options(
        name=name, num_cpus=cpus, resources={RESOURCE: 1}, max_concurrency=WAITING_CALLS
    )
    return actor.remote(name, config, lease_s)
