"""One episode's interpreter on a sandbox host; the same calls as `sandbox.Session`."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from actors.host_link import HostLink, HostLost
from actors.sandbox_host import SessionGone
from sandbox import FileRefused, RunResult, SandboxError, SandboxFile, SandboxUnavailable
from sandbox.session import code_refused

if TYPE_CHECKING:
    from actors.sandbox_hosts import SandboxHosts

INLINE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Place:
    """A session on a host."""

    link: HostLink
    session_id: str

    async def call(self, method: str, *arguments: Any) -> Any:
        return await self.link.call(method, self.session_id, *arguments)


class HostedSession:
    """Made by `SandboxHosts.acquire`; `release` it in the end, or use `async with`."""

    def __init__(self, hosts: SandboxHosts, place: Place, episode_id: str, acquire_s: float) -> None:
        self.episode_id = episode_id
        self.acquire_s = acquire_s
        self._hosts = hosts
        self._place: Place | None = place
        self._placing = asyncio.Lock()
        self._numbers = itertools.count()
        self._released = False
        hosts.counts.in_use += 1

    async def __aenter__(self) -> HostedSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    async def run(self, code: str, timeout_s: float | None = None) -> RunResult:
        """Run one cell. Whatever becomes of it is a status; raises SandboxError only after `release`."""
        self._check_open()
        limit = self._hosts.config.max_code_bytes
        if len(code) > limit:  # characters are no more than bytes; the exact check is the host's
            return code_refused(len(code), limit)
        started, number, place = time.monotonic(), next(self._numbers), None
        try:
            place = await self._placed()
            result: RunResult = await place.call("run", number, code, timeout_s)
        except asyncio.CancelledError:
            if place is not None:
                place.link.send("cancel", place.session_id, number)
            raise
        except SandboxError as error:
            self._check_open()
            self._leave(place)
            result = RunResult("infra_error", note=str(error), state_lost=True)
        # All that is not the run itself is waiting, the way to the host included.
        result = dataclasses.replace(result, queue_s=max(time.monotonic() - started - result.wall_s, 0.0))
        self._hosts.counts.count(result)
        return result

    async def put(self, name: str, data: bytes) -> None:
        """Write a file into the work folder. Raises FileRefused, SandboxUnavailable."""
        limit = self._hosts.config.max_file_bytes
        if len(data) > limit:
            raise FileRefused(f"{name!r} has {len(data)} bytes, the limit is {limit}")
        # Much data is copied into Ray's object store, which may have to make room first: not on the event loop.
        await self._file_call("put", name, await asyncio.to_thread(ray.put, data) if len(data) > INLINE_BYTES else data)

    async def get(self, name: str) -> bytes:
        """Read a file of the work folder. Raises FileRefused, SandboxUnavailable."""
        data: bytes = await self._file_call("get", name)
        return data

    async def files(self) -> list[SandboxFile]:
        """The regular files of the work folder, by name."""
        found: list[SandboxFile] = await self._file_call("files")
        return found

    async def _file_call(self, method: str, *arguments: Any) -> Any:
        self._check_open()
        place = await self._placed()
        try:
            return await place.call(method, *arguments)
        except (HostLost, SessionGone) as error:
            self._leave(place)
            raise SandboxUnavailable(f"the sandbox host went away during a file transfer: {error}") from error

    async def _placed(self) -> Place:
        async with self._placing:
            if self._place is None:
                self._place = await self._hosts.place(self.episode_id, None)
            return self._place

    def _leave(self, place: Place | None) -> None:
        """That session is gone with its state; the next call begins another."""
        if place is not None and self._place is place:
            self._place = None
            place.link.count(-1)
            place.link.send("release", place.session_id)

    def _check_open(self) -> None:
        if self._released:
            raise SandboxError(f"the session of episode {self.episode_id} was released")

    async def release(self) -> None:
        """Give the box back. May be called twice."""
        if self._released:
            return
        self._released = True
        self._hosts.counts.in_use -= 1
        self._leave(self._place)
