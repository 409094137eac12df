"""The interpreter of a rollout worker whose sandboxes live on other nodes: `SandboxHosts` in place of a `SandboxPool`.

Invariants:
- A new session goes to the least loaded host that lives, and to another when that one dies, falls silent or refuses; the
  queue is bounded in length and in time.
- A run on a host that is lost is `infra_error`, never the model's mistake; the next run of the episode starts anew elsewhere.
- Every session that was asked for is released, also when nobody waits for it any more.
- No call blocks the event loop: what asks Ray's directory goes to a thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
import uuid
from collections.abc import Mapping
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError

from actors.host_link import HostLink, HostLost
from actors.hosted_session import HostedSession, Place
from sandbox import PoolExhausted, PoolStats, SandboxConfig, SandboxError, SandboxUnavailable

log = logging.getLogger(__name__)

FIND_S = 5.0  # how often the directory is asked for hosts that came
FIND_FIRST_S = 0.5  # … while there is none
PATIENCE_S = 1.0  # a wait at one host is looked at again this often: another may have room by now


def host_name(run: str, index: int) -> str:
    """A new name under which a host is found; every replacement has its own, for Ray gives the old one back late."""
    return f"{_prefix(run)}{index}-{uuid.uuid4().hex[:8]}"


def _prefix(run: str) -> str:
    return f"{run}/sandbox-host/"


class SandboxHosts:
    """An async context manager with `acquire`, as the local pool is.

    Args:
        config: of the hosts' pools; its `run` names the hosts, its deadlines and bounds hold here too.
        owner: who holds the sessions, in the logs; None: machine and process.
        hosts: {name: actor handle}; None: those of the run, as they come and go.
    """

    def __init__(
        self, config: SandboxConfig, *, owner: str | None = None, hosts: Mapping[str, Any] | None = None
    ) -> None:
        self.config = config
        self.owner = owner or f"{socket.gethostname()}-{os.getpid()}"
        self.links: dict[str, HostLink] = {}
        self._given = hosts
        self._usable = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self.counts = PoolStats(backend="hosts")

    async def __aenter__(self) -> SandboxHosts:
        if self._given is None:
            self._start(self._find())
        else:
            for name, actor in self._given.items():
                self._link(name, actor)
        try:
            async with asyncio.timeout(self.config.acquire_deadline_s):
                await self._usable.wait()
        except TimeoutError:
            await self.close()
            raise SandboxUnavailable(
                f"no sandbox host of run {self.config.run} answered within {self.config.acquire_deadline_s:g} s; "
                "is there a node with the Ray resource `sandbox`?"
            ) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Lets go of the hosts, which release what was still held."""
        links = list(self.links.values())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in links:
            link.send("leave", link.owner)
            link.lose("the worker has closed its sandbox")

    async def acquire(
        self, *, episode_id: str, deadline_s: float | None = None, seed: int | None = None
    ) -> HostedSession:
        """A session on some host. Raises PoolExhausted, SandboxUnavailable."""
        started = time.monotonic()
        place = await self.place(episode_id, seed, deadline_s)
        self.counts.acquired += 1
        return HostedSession(self, place, episode_id, time.monotonic() - started)

    def stats(self) -> PoolStats:
        """Counters of what this worker asked for; the boxes themselves are in the hosts' own statistics."""
        return self.counts.copy(waiting=self._waiting)

    # What sessions call ---------------------------------------------------------------------------------------------

    async def place(self, episode_id: str, seed: int | None, deadline_s: float | None = None) -> Place:
        """A fresh session somewhere. Raises PoolExhausted, SandboxUnavailable."""
        limit_s = self.config.acquire_deadline_s if deadline_s is None else deadline_s
        if self._waiting >= self.config.max_waiters:
            raise PoolExhausted(f"{self._waiting} others of {self.owner} wait for a box already; add sandbox hosts")
        self._waiting += 1
        refusals: dict[str, str] = {}
        try:
            async with asyncio.timeout(limit_s):
                return await self._place(episode_id, seed, limit_s, refusals)
        except TimeoutError:
            lived = sum(link.usable for link in self.links.values())
            told = "; ".join(refusals.values()) or "all are full"
            raise PoolExhausted(f"no box within {limit_s:g} s on {lived} sandbox hosts: {told}") from None
        finally:
            self._waiting -= 1

    # The inside -----------------------------------------------------------------------------------------------------

    async def _place(self, episode_id: str, seed: int | None, limit_s: float, refusals: dict[str, str]) -> Place:
        while True:
            await self._usable.wait()
            link = self._best(refusals)
            if link is None:
                raise SandboxUnavailable(f"every sandbox host refused: {'; '.join(refusals.values())}")
            try:
                place = await self._take(link, episode_id, seed, limit_s)
            except HostLost as error:
                log.warning("episode %s looks for another host: %s", episode_id, error)
            except SandboxError as error:
                refusals[link.name] = f"{link.name}: {error}"
                link.shun()
            else:
                if place is not None:
                    return place

    async def _take(self, link: HostLink, episode_id: str, seed: int | None, limit_s: float) -> Place | None:
        """A session of this host; None when another got room meanwhile. Raises HostLost, SandboxError."""
        session_id = uuid.uuid4().hex
        link.count(+1)
        asked = asyncio.create_task(link.call("acquire", link.owner, session_id, episode_id, limit_s, seed))
        given = False
        try:
            while not (await asyncio.wait([asked], timeout=PATIENCE_S))[0]:
                if any(other.has_room for other in self.links.values() if other is not link):
                    return None
            link.load = asked.result()
            given = True
            return Place(link, session_id)
        finally:
            if not given:
                asked.cancel()
                link.count(-1)
                link.send("release", session_id)

    def _best(self, refusals: Mapping[str, str]) -> HostLink | None:
        links = [link for link in self.links.values() if link.usable and link.name not in refusals]
        random.shuffle(links)  # or every worker would begin with the same one
        return min(links, key=HostLink.rank, default=None)

    async def _find(self) -> None:
        """Takes up the run's hosts as they come."""
        prefix = _prefix(self.config.run)
        while True:
            try:
                for name in await asyncio.to_thread(ray.util.list_named_actors):
                    if name.startswith(prefix) and name not in self.links:
                        self._link(name, await asyncio.to_thread(ray.get_actor, name))
            except (RayError, ValueError) as error:  # the directory is away for a moment, or a host went meanwhile
                log.warning("looking for sandbox hosts: %s", error)
            await asyncio.sleep(FIND_S if self.links else FIND_FIRST_S)

    def _link(self, name: str, actor: Any) -> None:
        link = self.links[name] = HostLink(name, actor, self.owner)
        self._start(self._follow(link))

    async def _follow(self, link: HostLink) -> None:
        following = asyncio.create_task(link.follow())
        try:
            while not following.done() and not link.usable:  # its first answer makes it one to choose
                await asyncio.wait([following], timeout=0.02)
            if link.usable:
                self._usable.set()
            log.warning("%s", await following)
        finally:
            following.cancel()
            if self.links.get(link.name) is link:
                del self.links[link.name]
            if not any(other.usable for other in self.links.values()):
                self._usable.clear()

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
