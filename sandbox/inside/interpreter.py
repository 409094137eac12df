"""What the forked child does: takes cells from a pipe, runs them, writes results to a pipe, until the pipe ends.

Fixed binary messages with methods bound at import: nothing a cell replaces (json, struct, builtins) changes what is
sent. The parent trusts none of it; see `sandbox.inside.child`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import NoReturn

from sandbox.inside.cell import CellRunner, new_main_module

# parent → child: kind, token, length of the code, seed present, seed
COMMAND = struct.Struct(">B16sIBQ")
# child → parent: kind, token, status, has exit code, exit code, value bytes, error bytes
REPLY = struct.Struct(">B16sBBiII")
RUN, PING = 1, 2
RESULT, PONG = 1, 2
MAX_CODE_BYTES = 16 * 2**20
_PR_SET_DUMPABLE = 4
_HIGH_FD = 200  # ours live up here, out of the way of code that counts from 3

_read, _write, _getpid, _exit, _len = os.read, os.write, os.getpid, os._exit, len
_pack, _unpack = REPLY.pack, COMMAND.unpack
_dup2 = os.dup2


def _read_exactly(fd: int, size: int) -> bytes | None:
    chunks = b""
    while _len(chunks) < size:
        chunk = _read(fd, size - _len(chunks))
        if not chunk:
            return None
        chunks += chunk
    return chunks


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[_write(fd, view) :]


def prctl_dumpable(value: int) -> None:
    """Whether other processes of this uid may open our descriptors, memory and environment."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")


def become(command: int, result: int, out: int, err: int, work: str, limit: int, enter: Callable[[], None]) -> NoReturn:
    """Turn a fresh fork into an interpreter. Keeps the four pipes and nothing else of the parent's."""
    os.setsid()
    ours = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for fd in (command, result, out, err)]
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        _dup2(source, target)
    os.closerange(3, _HIGH_FD)
    os.closerange(max(ours) + 1, _most_descriptors())
    enter()
    prctl_dumpable(1)
    # First to go when memory runs out, before the parent.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    for number in (signal.SIGPIPE, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError):
        os.chmod(work, 0o700)  # an earlier cell may have taken it away from itself
    os.chdir(work)
    # Lines leave at once, so that a killed run keeps what it printed.
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = open(  # noqa: SIM115  lives as long as the process
            fd, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.argv = [""]
    sys.path.insert(0, work)
    _reseed(None)  # or every episode of this box would draw the same numbers
    _serve(ours[0], ours[1], ours[2], ours[3], limit)


def _most_descriptors() -> int:
    # Where the kernel has no close_range (gVisor), each number costs a system call.
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 65536)


def _serve(command: int, result: int, out: int, err: int, limit: int) -> NoReturn:
    pid = _getpid()
    main = new_main_module()
    sys.modules["__main__"] = main
    runner = CellRunner(main.__dict__, limit)
    streams = (sys.stdout, sys.stderr)
    while True:
        try:
            head = _read_exactly(command, COMMAND.size)
            if head is None:
                _exit(0)
            kind, token, code_bytes, has_seed, seed = _unpack(head)
            if kind == PING:
                _write_all(result, _pack(PONG, token, 0, 0, 0, 0, 0))
                continue
            code = _read_exactly(command, code_bytes)
            if code is None:
                _exit(0)
            _dup2(out, 1)
            _dup2(err, 2)
            if has_seed:
                _reseed(seed)
            outcome = runner.run(code.decode("utf-8", "replace"))
            for stream in (sys.stdout, sys.stderr, *streams):
                with contextlib.suppress(BaseException):
                    stream.flush()
            if _getpid() != pid:  # a child that the cell forked and let run on into our loop
                _exit(0)
            value = outcome.value.encode("utf-8", "backslashreplace")
            error = outcome.error.encode("utf-8", "backslashreplace")
            coded = outcome.exit_code is not None
            head = _pack(RESULT, token, 1 if error else 0, coded, outcome.exit_code or 0, _len(value), _len(error))
            # The ping that came with the cell is read only now, so that it lay in no variable while the cell ran.
            ping = _read_exactly(command, COMMAND.size)
            if ping is None:
                _exit(0)
            _write_all(result, head + value + error + _pack(PONG, _unpack(ping)[1], 0, 0, 0, 0, 0))
        except KeyboardInterrupt:  # a late signal to ourselves, between two cells
            continue


def _reseed(seed: int | None) -> None:
    random.seed(seed)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(None if seed is None else seed % 2**32)
