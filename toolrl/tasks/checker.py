"""Answers are checked in processes of their own, with a deadline.

Invariants:
- Nothing here blocks the event loop: processes are spoken to over sockets, and a slow verifier only keeps its own
  caller waiting.
- A verifier that hangs, crashes, raises or returns no finite number costs the one answer it was asked about:
  `VerifierFailed`. A process that hung or died is killed and replaced by the next answer.
- The deadline covers the verifier's own run: neither the wait for a free process nor the import of its libraries
  counts.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any, Self

from toolrl.config import TaskConfig
from toolrl.errors import UserError
from toolrl.tasks import verifiers
from toolrl.tasks.task import Task
from toolrl.tasks.verifier_process import LENGTH

LOAD_DEADLINE_S = 120.0


class VerifierFailed(Exception):
    """The verifier gave no score; says which one and why. The reward is then missing, by no fault of the policy."""


class AnswerChecker:
    """Scores answers in `verifier_processes` persistent processes.

    An async context manager; processes start with the first answer.

    Args:
        config: `verifier_deadline_s` bounds the run time of one check, after which its process is killed.
        memory_gib: data segment of a process; a verifier that wants more gets MemoryError.
    """

    def __init__(self, config: TaskConfig, *, memory_gib: float = 4.0) -> None:
        if config.verifier_processes < 1:
            raise UserError(f"tasks.verifier_processes={config.verifier_processes} must be at least 1")
        self._deadline_s = config.verifier_deadline_s
        self._memory_gib = memory_gib
        self._free = asyncio.Semaphore(config.verifier_processes)
        self._idle: list[_Process] = []
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; a check that still runs ends its own when it is done."""
        self._closed = True
        while self._idle:
            self._idle.pop().kill()

    async def check(self, task: Task, answer: str | None) -> float:
        """The score of `answer`; 0 for None. Raises VerifierFailed when there is none."""
        if answer is None:
            return 0.0
        if task.verifier in verifiers.EQUAL_IS_RIGHT and verifiers.equal(answer, task.ground_truth):
            return 1.0
        request = {"answer": answer, "ground_truth": task.ground_truth, "details": task.details}
        score = await self._ask(task.verifier, request)
        if not math.isfinite(score):
            raise VerifierFailed(
                f"verifier {task.verifier!r} returned {score} for task {task.id}; a score must be finite"
            )
        return score

    async def load(self, verifier: str) -> None:
        """Start a process with the verifier's libraries, so that a wrong name fails before the run starts."""
        await self._ask(verifier, None)

    async def _ask(self, verifier: str, request: dict[str, Any] | None) -> float:
        if self._closed:
            raise RuntimeError("the answer checker is closed")
        async with self._free:
            process = self._idle.pop() if self._idle else await _Process.start(self._memory_gib)
            try:
                score = await self._converse(process, verifier, request)
            except VerifierFailed:
                self._keep(process)
                raise
            except BaseException as error:
                # After a deadline, a crash or our own cancellation a late reply could answer the next request.
                process.kill()
                if isinstance(error, _Dead):
                    raise VerifierFailed(f"verifier {verifier!r} {error}") from error
                raise
            self._keep(process)
            return score

    def _keep(self, process: _Process) -> None:
        if self._closed:
            process.kill()
        else:
            self._idle.append(process)

    async def _converse(self, process: _Process, verifier: str, request: dict[str, Any] | None) -> float:
        score = 0.0
        if verifier not in process.loaded:
            await process.ask({"kind": "load", "verifier": verifier}, LOAD_DEADLINE_S)
            process.loaded.add(verifier)
        if request is not None:
            score = await process.ask({"kind": "check", "verifier": verifier, **request}, self._deadline_s)
        return score


class _Dead(Exception):
    """The process hung or is gone; says how."""


class _Process:
    """One verifier process and the socket to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.loaded: set[str] = set()

    @classmethod
    async def start(cls, memory_gib: float) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            process = _spawn(theirs, memory_gib)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer)

    async def ask(self, request: dict[str, Any], deadline_s: float) -> float:
        """The reply's score. Raises VerifierFailed for a refusal and _Dead when there is no reply."""
        body = pickle.dumps({**request, "deadline_s": deadline_s})
        try:
            async with asyncio.timeout(deadline_s):
                self._writer.write(LENGTH.pack(len(body)) + body)
                await self._writer.drain()
                header = await self._reader.readexactly(LENGTH.size)
                reply = json.loads(await self._reader.readexactly(LENGTH.unpack(header)[0]))
        except TimeoutError as error:
            raise _Dead(f"did not answer within {deadline_s:g} s") from error
        except (OSError, EOFError) as error:
            raise _Dead("took its process down with it") from error
        if "error" in reply:
            raise VerifierFailed(reply["error"])
        return float(reply["score"])

    def kill(self) -> None:
        self._writer.close()
        self._process.kill()
        threading.Thread(target=self._process.wait, name="reap-verifier", daemon=True).start()


def _spawn(channel: socket.socket, memory_gib: float) -> subprocess.Popen[bytes]:
    # A fresh interpreter, not a fork: the owner has threads, a GPU perhaps, and a main module that must not run again.
    command = [
        sys.executable,
        "-c",
        "from toolrl.tasks.verifier_process import main; main()",
        str(channel.fileno()),
        str(memory_gib),
    ]
    # The user's own verifier is found where this process would find it.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[channel.fileno()])
