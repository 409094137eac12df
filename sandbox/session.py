"""One episode's interpreter: state lives from `acquire` to `release` and never beyond.

A box that dies in mid-episode is told by the status of that run; the next run gets a new one, and `state_lost` is
said once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sandbox.backend import Box
from sandbox.channel import ChannelClosed
from sandbox.inside.frames import Frame
from sandbox.result import (
    STATE_LOST_NOTE,
    FileRefused,
    RunResult,
    SandboxError,
    SandboxFile,
    SandboxUnavailable,
    Status,
    from_frame,
)

if TYPE_CHECKING:
    from sandbox.pool import SandboxPool

logger = logging.getLogger(__name__)
_FILE_DEADLINE_S = 30.0


def code_refused(size: int, limit: int) -> RunResult:
    """The end of a cell that is too long to be run."""
    return RunResult("error", stderr=f"code of {size} bytes refused: the limit is {limit} bytes\n")


class Session:
    """Made by `SandboxPool.acquire`. Runs are one at a time; `release` is to be awaited in the end, or use `async
    with`."""

    def __init__(self, pool: SandboxPool, box: Box, episode_id: str, seed: int | None, queue_s: float) -> None:
        self.episode_id = episode_id
        self.acquire_s = queue_s  # waited for the box
        self._pool = pool
        self._box: Box | None = box
        self._seed = seed
        self._lock = asyncio.Lock()
        self._lost = False  # state went, and no result has said so yet
        self._released = False

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()

    async def run(self, code: str, timeout_s: float | None = None) -> RunResult:
        """Run one cell. Whatever the cell does is a status; raises SandboxError only after `release`."""
        config = self._pool.config
        timeout_s = config.timeout_s if timeout_s is None else timeout_s
        source = code.encode("utf-8", "backslashreplace")
        if len(source) > config.max_code_bytes:
            return code_refused(len(source), config.max_code_bytes)
        asked = time.monotonic()
        async with self._lock:
            self._check_open()
            try:
                box = self._box or await self._replace_box()
            except SandboxError as error:
                return RunResult("infra_error", note=str(error), state_lost=True)
            async with self._pool.run_slots:
                result = await self._run_on(box, source, timeout_s, time.monotonic() - asked)
        self._pool.counts.count(result)
        return self._told(result)

    async def _run_on(self, box: Box, source: bytes, timeout_s: float, queue_s: float) -> RunResult:
        config, start = self._pool.config, time.monotonic()
        status: Status
        seed, self._seed = self._seed, None
        header = {"op": "run", "timeout_s": timeout_s, **({} if seed is None else {"seed": seed})}
        try:
            frame = await box.channel.request(header, source, deadline_s=timeout_s + config.grace_s)
            return from_frame(frame.header, frame.parts, timeout_s, queue_s)
        except asyncio.CancelledError:
            self._lost = True
            raise
        except TimeoutError:
            status, note = "timeout", f"The run was stopped after {timeout_s:g} s. {STATE_LOST_NOTE}"
        except ChannelClosed:
            status, why = await box.cause_of_death()
            note = f"{why}. {STATE_LOST_NOTE}"
        except (KeyError, TypeError, ValueError) as error:
            status, note = "infra_error", f"the box answered with a malformed result: {error!r}"
            self._pool.counts.suspect("malformed_answer")
        logger.log(
            logging.WARNING if status == "infra_error" else logging.INFO, "box %s: %s: %s", box.name, status, note
        )
        self._box = None
        self._pool.discard(box)
        return RunResult(status, note=note, state_lost=True, wall_s=time.monotonic() - start, queue_s=queue_s)

    async def _replace_box(self) -> Box:
        self._box = await self._pool.take_box(self._pool.config.acquire_deadline_s)
        return self._box

    def _told(self, result: RunResult) -> RunResult:
        """Say once that state went with an earlier, cancelled run."""
        if self._lost and not result.state_lost:
            note = f"{result.note} {STATE_LOST_NOTE}".strip()
            result = dataclasses.replace(result, state_lost=True, note=note)
        self._lost = False
        return result

    async def put(self, name: str, data: bytes) -> None:
        """Write a file into the work folder. Raises FileRefused, SandboxUnavailable."""
        limit = self._pool.config.max_file_bytes
        if len(data) > limit:
            raise FileRefused(f"{name!r} has {len(data)} bytes, the limit is {limit}")
        await self._file_request({"op": "put", "name": name}, data)

    async def get(self, name: str) -> bytes:
        """Read a file of the work folder. Raises FileRefused, SandboxUnavailable."""
        _, parts = await self._file_request({"op": "get", "name": name})
        return parts[0]

    async def files(self) -> list[SandboxFile]:
        """The regular files of the work folder, by name."""
        header, _ = await self._file_request({"op": "files"})
        return [SandboxFile(str(file["name"]), int(file["size"])) for file in header["files"]]

    async def _file_request(self, header: dict[str, Any], *parts: bytes) -> Frame:
        async with self._lock:
            self._check_open()
            box = self._box or await self._replace_box()
            try:
                frame = await box.channel.request(header, *parts, deadline_s=_FILE_DEADLINE_S)
            except (ChannelClosed, TimeoutError) as error:
                self._box, self._lost = None, True
                self._pool.discard(box)
                raise SandboxUnavailable(f"the box went away during a file transfer: {error}") from error
        if "refused" in frame.header:
            raise FileRefused(str(frame.header["refused"]))
        return frame

    def _check_open(self) -> None:
        if self._released:
            raise SandboxError(f"the session of episode {self.episode_id} was released")

    async def release(self) -> None:
        """Give the box back; it is reset in the background. May be called twice."""
        if self._released:
            return
        self._released = True
        box, self._box = self._box, None
        if box is not None:
            self._pool.give_back(box)
