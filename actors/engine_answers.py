"""A pipe on which an engine's processes say that they are done with something, without a message through vLLM's loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Any

GOOD, BAD = b"+", b"-"


class Answers:
    """One byte from each of `expected` processes, which `answer` at `address`. Belongs to the running event loop."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._answers = b""
        self._came = asyncio.Event()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # The path and which pipe it is: a late answer must not go into what has taken over the descriptor's number.
        self.address = [f"/proc/{os.getpid()}/fd/{self._writer}", os.fstat(self._writer).st_ino]
        asyncio.get_running_loop().add_reader(self._reader, self._read)

    def _read(self) -> None:
        self._answers += os.read(self._reader, self._expected)
        if len(self._answers) >= self._expected:
            self._came.set()

    async def all_in(self, within_s: float) -> bool:
        """Waits for the rest of the answers, so long at most."""
        try:
            await asyncio.wait_for(self._came.wait(), within_s)
        except TimeoutError:
            return False
        return True

    @property
    def good(self) -> bool:
        """Whether all that came say so."""
        return set(self._answers) <= set(GOOD)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)
        os.close(self._writer)


def answer(address: Sequence[Any], verdict: bytes) -> None:
    """Writes `GOOD` or `BAD`, unless nobody waits for it any more."""
    path, inode = address
    with contextlib.suppress(OSError):
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if os.fstat(pipe).st_ino == inode:
                os.write(pipe, verdict)
        finally:
            os.close(pipe)
