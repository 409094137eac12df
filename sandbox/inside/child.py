"""The parent's side of one interpreter child: forks it, hands it a cell, watches it to the end.

The result pipe is untrusted. A result counts only if it carries this run's random token, fits the caps, and the answer to
a ping follows with nothing before or after: a forged result is followed by the real one, which is caught there or before
the next run.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sandbox.inside import interpreter
from sandbox.inside.capture import Capture

_READ_BYTES = 65536
_LOOK_EVERY_S = 0.02
_PONG_BYTES = interpreter.REPLY.size


class Channel(Protocol):
    """The stream to the host, watched while a cell runs."""

    fd: int

    def cancelled(self, run_id: int) -> bool:
        """Read what has arrived; whether it cancels this run. Exits the process where the stream has ended."""


@dataclass
class Caps:
    """Sizes in bytes. `shown`: kept of each stream and of the echoed value; `output`: printing more than this ends
    the run."""

    shown: int = 65536
    output: int = 16 * 2**20


@dataclass
class RunOutcome:
    """How a run ended. `exit_code` is negative for a signal; `lost` says whether the child is gone."""

    status: str
    stdout: Capture
    stderr: Capture
    value: bytes = b""
    error: bytes = b""
    exit_code: int | None = None
    lost: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0
    note: str = ""


class Violation(Exception):
    """The child's pipe holds what an honest child never writes."""


class Child:
    """One interpreter process. `run` may be called until it reports `lost`; `close` frees the descriptors."""

    def __init__(self, work: str, caps: Caps, enter: Callable[[], None]) -> None:
        self._caps = caps
        command, self._command = os.pipe()
        self._result, result = os.pipe()
        self._out, out = os.pipe()
        self._err, err = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                interpreter.become(command, result, out, err, work, caps.shown, enter)
            except BaseException:
                with contextlib.suppress(BaseException):
                    os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(70)
        for fd in (command, result, out, err):
            os.close(fd)
        for fd in (self._command, self._result, self._out, self._err):
            os.set_blocking(fd, False)
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            self._pidfd = -1  # gVisor has none: its death is then seen by looking
        self._reaped: tuple[int, float] | None = None

    def close(self) -> None:
        """Free the descriptors; the process must have been killed and reaped."""
        for fd in (self._command, self._result, self._out, self._err, self._pidfd):
            if fd >= 0:
                os.close(fd)

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._reaped is None and self._wait(os.WNOHANG) is None

    def _wait(self, options: int) -> tuple[int, float] | None:
        """(exit code, negative for a signal; cpu seconds of it and its waited-for children) once it is dead."""
        if self._reaped is None:
            try:
                pid, status, usage = os.wait4(self.pid, options)
            except ChildProcessError:  # reaped by a kill of everything
                self._reaped = (-signal.SIGKILL, 0.0)
                return self._reaped
            if pid:
                self._reaped = (os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)
        return self._reaped

    def _cpu_s(self) -> float:
        # The clock of another process: the kernel's encoding of a pid into a clock id.
        with contextlib.suppress(OSError):
            return time.clock_gettime((~self.pid << 3) | 2)
        return 0.0

    def run(self, run_id: int, code: bytes, timeout_s: float, seed: int | None, channel: Channel) -> RunOutcome:
        """Run one cell to its end, its deadline, its cap or its cancellation. Never raises for what the child does."""
        outcome = RunOutcome("ok", Capture(self._caps.shown), Capture(self._caps.shown))
        start, cpu_start = time.monotonic(), self._cpu_s()
        try:
            if not self._readable(self._result):
                secret = os.urandom(32)
                token, ping = secret[:16], secret[16:]
                head = interpreter.COMMAND.pack(
                    interpreter.RUN, token, len(code), seed is not None, (seed or 0) % 2**64
                )
                # The ping goes along: an honest child answers it in one breath with the result.
                tail = interpreter.COMMAND.pack(interpreter.PING, ping, 0, 0, 0)
                self._watch(outcome, (token, ping), head + code + tail, start + timeout_s, run_id, channel)
            else:
                raise Violation("bytes on the result pipe before the run")
        except Violation as violation:
            outcome.status, outcome.note = "protocol_violation", str(violation)
            outcome.value = outcome.error = b""
            outcome.exit_code = None
        if outcome.status not in ("ok", "error"):
            outcome.lost = True
        self._drain(outcome)
        outcome.wall_s = time.monotonic() - start
        cpu_end = self._reaped[1] if self._reaped else self._cpu_s()
        outcome.cpu_s = max(cpu_end - cpu_start, 0.0)
        return outcome

    def _watch(
        self,
        outcome: RunOutcome,
        tokens: tuple[bytes, bytes],
        to_send: bytes,
        deadline: float,
        run_id: int,
        channel: Channel,
    ) -> None:
        poller = select.poll()
        for fd in (self._result, self._out, self._err, self._pidfd, channel.fd):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        look_every_s = math.inf if self._pidfd >= 0 else _LOOK_EVERY_S
        to_send = self._send(to_send, poller)
        received, complete = b"", False
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                outcome.status = "timeout"
                return
            ready = {fd for fd, _ in poller.poll(math.ceil(min(left_s, look_every_s) * 1000))}
            if self._command in ready:
                to_send = self._send(to_send, poller)
            for fd, stream in ((self._out, outcome.stdout), (self._err, outcome.stderr)):
                if fd in ready:
                    self._take(fd, stream, poller)
            if outcome.stdout.total + outcome.stderr.total > self._caps.output:
                outcome.status = "output_limit"
                return
            if self._result in ready:
                received += self._take_result(poller)
                if not complete and (end := self._parse_result(received, tokens[0], outcome)):
                    complete, received = True, received[end:]
                if complete and len(received) >= _PONG_BYTES:
                    self._check_pong(received, tokens[1])
                    return
            elif self._pidfd in ready or (not ready and self._pidfd < 0 and not self.alive()):
                # Its last output and a result, if any, are in the pipes already.
                code, _ = self._wait(0) or (0, 0.0)
                outcome.status, outcome.exit_code = "died", code
                return
            if channel.fd in ready and channel.cancelled(run_id):
                outcome.status = "cancelled"
                return

    def _send(self, data: bytes, poller: select.poll) -> bytes:
        """Write what the pipe takes; what is left waits for it to be writable."""
        try:
            sent = os.write(self._command, data)
        except BlockingIOError:
            sent = 0
        except BrokenPipeError:  # dead: its pidfd tells
            sent = len(data)
        data = data[sent:]
        if data:
            poller.register(self._command, select.POLLOUT)
        else:
            with contextlib.suppress(KeyError):
                poller.unregister(self._command)
        return data

    def _take(self, fd: int, stream: Capture, poller: select.poll) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            stream.feed(data)
        else:
            poller.unregister(fd)

    def _take_result(self, poller: select.poll) -> bytes:
        data = os.read(self._result, _READ_BYTES)
        if not data:  # closed by the cell; death, if it comes, is told by the pidfd
            poller.unregister(self._result)
        return data

    def _parse_result(self, received: bytes, token: bytes, outcome: RunOutcome) -> int:
        """Where the one result of this run ends in `received`, which is then filled in; 0 while it is not whole. Raises
        Violation."""
        if len(received) < interpreter.REPLY.size:
            return 0
        kind, echoed, status, coded, exit_code, value_bytes, error_bytes = interpreter.REPLY.unpack_from(received)
        # A character is at most 4 bytes, or 10 as an escape, and a note of what was left out comes on top.
        most = self._caps.shown * 10 + 1024
        if kind != interpreter.RESULT or echoed != token or value_bytes > most or error_bytes > most or status > 1:
            raise Violation("a result that this run did not make")
        end = interpreter.REPLY.size + value_bytes + error_bytes
        if len(received) < end:
            return 0
        body = received[interpreter.REPLY.size : end]
        outcome.value, outcome.error = body[:value_bytes], body[value_bytes:]
        outcome.status = "error" if status else "ok"
        outcome.exit_code = exit_code if coded else None
        return int(end)

    def _check_pong(self, received: bytes, token: bytes) -> None:
        expected = interpreter.REPLY.pack(interpreter.PONG, token, 0, 0, 0, 0, 0)
        if received != expected:
            raise Violation("bytes after the result")

    def _readable(self, fd: int) -> bool:
        return bool(select.select([fd], [], [], 0)[0]) and self.alive()

    def _drain(self, outcome: RunOutcome) -> None:
        """Take what is in the pipes now, without waiting for writers that stay."""
        for fd, stream in ((self._out, outcome.stdout), (self._err, outcome.stderr)):
            for _ in range(32):  # a pipe holds 64 KiB; somebody who goes on writing is not waited for
                try:
                    data = os.read(fd, _READ_BYTES)
                except BlockingIOError:
                    break
                if not data:
                    break
                stream.feed(data)
