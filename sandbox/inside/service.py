"""The loop of a box: one request frame after the other, one interpreter child at a time.

Invariants:
- When a reset has answered `clean`, no process of the earlier episode lives and none of its files is left; anything
  that could not be shown to be so makes the answer unclean, and the host destroys the box.
- The end of the host's stream ends the box at once, in mid-run too. So does a long silence (`ttl_s`).
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from sandbox.inside import files
from sandbox.inside.child import Caps, Child, RunOutcome
from sandbox.inside.frames import PROTOCOL_VERSION, Frame, FrameDecoder, FrameError, encode

EXIT_STREAM_ENDED = 0
EXIT_BAD_STREAM = 75
EXIT_SILENT = 76


class Premises(Protocol):
    """What differs between a container and a local box."""

    def open(self, settings: dict[str, Any]) -> None:
        """Called once, before anything else, with the host's settings."""

    @property
    def work(self) -> str:
        """The folder a cell starts in."""

    @property
    def enter(self) -> Callable[[], None]:
        """Called in each fresh child before it takes cells."""

    def kill_others(self) -> None:
        """Kill and reap every process of the episode. Returns when none is left."""

    def wipe(self) -> None:
        """Remove the files of the episode."""

    def leftovers(self) -> list[str]:
        """What a kill and a wipe did not remove; empty when the box is as new."""

    def oom_kills(self) -> int:
        """How often the kernel has killed for memory in this box."""

    def leave(self) -> None:
        """Last words before the process exits."""


@dataclass
class HostStream:
    """The framed stream to the host, over two descriptors."""

    fd: int
    out_fd: int
    leave: Callable[[], None]

    def __post_init__(self) -> None:
        self._decoder = FrameDecoder()
        self._frames: list[Frame] = []

    def send(self, header: dict[str, Any], *parts: bytes) -> None:
        """Write one frame; blocks while the host does not read."""
        view = memoryview(encode(header, *parts))
        while view:
            try:
                view = view[os.write(self.out_fd, view) :]
            except BlockingIOError:
                select.select([], [self.out_fd], [])
            except OSError:
                self.exit(EXIT_STREAM_ENDED)

    def exit(self, code: int) -> NoReturn:
        """End the box."""
        try:
            self.leave()
        finally:
            os._exit(code)

    def _read(self) -> None:
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            data = b""
        if not data:
            self.exit(EXIT_STREAM_ENDED)
        try:
            self._frames += self._decoder.feed(data)
        except FrameError as error:
            print(f"bad frame from the host: {error}", file=sys.stderr, flush=True)
            self.exit(EXIT_BAD_STREAM)

    def next(self, ttl_s: float) -> Frame:
        """The next request. Exits on the end of the stream and after `ttl_s` of silence."""
        deadline = time.monotonic() + ttl_s
        while not self._frames:
            if not select.select([self.fd], [], [], max(deadline - time.monotonic(), 0))[0]:
                self.exit(EXIT_SILENT)
            self._read()
        return self._frames.pop(0)

    def cancelled(self, run_id: int) -> bool:
        """Read what has arrived during a run; whether it cancels that run."""
        self._read()
        return self.has_cancel(run_id)

    def has_cancel(self, run_id: int) -> bool:
        """Whether the cancellation of a run is among what was read."""
        return any(frame.header.get("op") == "cancel" and frame.header.get("id") == run_id for frame in self._frames)


class Service:
    """Serves one host until its stream ends."""

    def __init__(self, premises: Premises, in_fd: int, out_fd: int) -> None:
        self._premises = premises
        self._stream = HostStream(in_fd, out_fd, premises.leave)
        self._caps = Caps()
        self._max_file_bytes = 2**24
        self._child: Child | None = None
        self._oom_kills = 0

    def serve(self) -> NoReturn:
        """Greet, prepare as the first frame says, then answer requests until the stream ends."""
        settings = self._stream.next(60.0).header
        self._caps = Caps(shown=int(settings["max_output_bytes"]), output=int(settings["output_limit_bytes"]))
        self._max_file_bytes = int(settings["max_file_bytes"])
        ttl_s = float(settings["ttl_s"])
        missing = []
        for name in settings["preimport"]:
            try:
                importlib.import_module(name)
            except ImportError as error:
                missing.append(f"{name}: {error}")
        if "numpy" in sys.modules:  # recent ones load it late, and a child's seed needs it there
            importlib.import_module("numpy.random")
        self._premises.open(settings)
        # What is imported stays shared between the parent and its children.
        gc.collect()
        gc.freeze()
        reset = self._reset()
        hello = {"protocol": PROTOCOL_VERSION, "python": sys.version.split()[0], "missing": missing}
        self._stream.send({"id": settings.get("id"), **hello, **reset})
        while True:
            frame = self._stream.next(ttl_s)
            if frame.header.get("op") != "cancel":  # one that came too late
                self._answer(frame)

    def _answer(self, frame: Frame) -> None:
        header, parts = frame
        request, op = header.get("id"), header.get("op")
        if op == "run":
            self._answer_run(header, parts[0])
        elif op == "reset":
            self._stream.send({"id": request, **self._reset()})
        elif op == "ping":
            self._stream.send({"id": request})
        elif op in ("put", "get", "files"):
            self._answer_files(header, parts)
        else:
            self._stream.send({"id": request, "refused": f"unknown request {op!r}"})

    def _answer_files(self, header: dict[str, Any], parts: list[bytes]) -> None:
        answer: dict[str, Any] = {"id": header.get("id")}
        body: tuple[bytes, ...] = ()
        work = self._premises.work
        try:
            if header["op"] == "put":
                files.put(work, str(header["name"]), parts[0])
            elif header["op"] == "get":
                body = (files.get(work, str(header["name"]), self._max_file_bytes),)
            else:
                answer["files"] = files.listing(work)
        except (files.FileRefused, OSError) as error:
            answer["refused"] = str(error)
        self._stream.send(answer, *body)

    def _reset(self) -> dict[str, Any]:
        start = time.monotonic()
        problems = []
        self._restart_child(fork=False)
        try:
            self._premises.wipe()
            problems = self._premises.leftovers()
            self._child = Child(self._premises.work, self._caps, self._premises.enter)
        except Exception as error:  # whatever it was: the host destroys the box
            problems.append(f"reset failed: {type(error).__name__}: {error}")
        self._oom_kills = self._premises.oom_kills()
        return {"clean": not problems, "leftovers": problems, "wall_s": time.monotonic() - start}

    def _restart_child(self, fork: bool = True) -> None:
        self._premises.kill_others()
        if self._child is not None:
            self._child.close()
            self._child = None
        if fork:
            self._child = Child(self._premises.work, self._caps, self._premises.enter)

    def _answer_run(self, header: dict[str, Any], code: bytes) -> None:
        run_id = int(header["id"])
        if self._stream.has_cancel(run_id):  # nobody waits for it any more
            return
        lost_before = self._child is None or not self._child.alive()
        if lost_before:
            self._restart_child()
        assert self._child is not None
        seed = header.get("seed")
        outcome = self._child.run(run_id, code, float(header["timeout_s"]), seed, self._stream)
        self._tell_oom(outcome)
        if outcome.lost:
            if outcome.status == "protocol_violation":
                self._reset()
            else:
                self._restart_child()
        self._stream.send(*_result_frame(run_id, outcome, lost_before))

    def _tell_oom(self, outcome: RunOutcome) -> None:
        """A death by SIGKILL, or a run that hangs because a part of it was killed, is `oom` if the kernel says so."""
        if outcome.status in ("died", "timeout"):
            kills = self._premises.oom_kills()
            if kills > self._oom_kills and outcome.exit_code in (None, -9):
                outcome.status = "oom"
            self._oom_kills = kills


def _result_frame(run_id: int, outcome: RunOutcome, lost_before: bool) -> tuple[dict[str, Any], *tuple[bytes, ...]]:
    header = {
        "id": run_id,
        "status": outcome.status,
        "exit_code": outcome.exit_code,
        "wall_s": round(outcome.wall_s, 6),
        "cpu_s": round(outcome.cpu_s, 6),
        "state_lost": outcome.lost or lost_before,
        "stdout_bytes": outcome.stdout.total,
        "stderr_bytes": outcome.stderr.total,
        "note": outcome.note,
    }
    return header, *outcome.stdout.parts(), *outcome.stderr.parts(), outcome.value, outcome.error
