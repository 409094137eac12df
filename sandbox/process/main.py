"""First process of a local box: owns the channel to the host, forks interpreters, kills its descendants, removes its
directory.

Separate from the container's warden on purpose: it wipes nothing, it only removes the one directory that it made
itself. Under bubblewrap it is pid 1 of its own namespaces; without, it adopts orphans (subreaper) and limits are all
there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from sandbox.inside import seccomp, traces
from sandbox.inside.interpreter import prctl_dumpable
from sandbox.inside.service import Service
from sandbox.process.owned_directory import OwnedDirectory

CONFINED_PARENT = "/sbx/box"  # a tmpfs that bubblewrap makes; see `launch`
EPISODE = "episode"
_PR_SET_CHILD_SUBREAPER = 36
_CAPABILITY_VERSION = 0x20080522
_KILL_DEADLINE_S = 5.0
_THREAD_STACK_BYTES = 2**20  # stacks count as memory here, used or not


class LocalBox:
    """What the service asks of the place around it."""

    def __init__(self) -> None:
        self._confined = os.getpid() == 1 and os.path.ismount(CONFINED_PARENT)
        self._directory: OwnedDirectory | None = None
        self._settings: dict[str, Any] = {}
        self._own_state: tuple[Any, ...] = ()

    def open(self, settings: dict[str, Any]) -> None:
        """Give up root where bubblewrap was started by root, and take in orphans."""
        self._settings = settings
        if self._confined and os.getuid() == 0:
            uid = int(settings["uid"])
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            _drop_capabilities()
        if not self._confined:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        prctl_dumpable(0)
        seccomp.install()
        self._own_state = traces.own_state()

    @property
    def work(self) -> str:
        """The folder a cell starts in."""
        assert self._directory is not None
        return os.path.join(self._directory.path, "work")

    @property
    def enter(self) -> Callable[[], None]:
        """Sets the limits of a fresh child."""
        return self._limit

    def _limit(self) -> None:
        memory = int(self._settings["memory_mib"]) * 2**20
        limits = {
            resource.RLIMIT_DATA: memory,  # not RLIMIT_AS: numpy maps far more than it uses
            resource.RLIMIT_FSIZE: int(self._settings["work_mib"]) * 2**20,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: 1024,
        }
        if self._confined:  # the count is per user: without a user of its own it would count strangers
            limits[resource.RLIMIT_NPROC] = int(self._settings["pids"])
        threading.stack_size(_THREAD_STACK_BYTES)
        for limit, value in limits.items():
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))

    def kill_others(self) -> None:
        """Kill and reap every descendant."""
        deadline = time.monotonic() + _KILL_DEADLINE_S
        while time.monotonic() < deadline:
            self._kill_all() if self._confined else _kill_descendants()
            try:
                while os.waitpid(-1, 0 if self._confined else os.WNOHANG) != (0, 0):
                    pass
            except ChildProcessError:
                return
            time.sleep(0.001)
        raise TimeoutError("processes of the episode do not die")

    def _kill_all(self) -> None:
        """All of our pid namespace, at once; this process is its pid 1."""
        assert os.getpid() == 1 and self._confined
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)

    def wipe(self) -> None:
        """Remove the episode's directory and make a new one."""
        if self._directory is not None:
            self._directory.remove()
            self._directory = None
        if self._confined:
            self._directory = OwnedDirectory(CONFINED_PARENT, EPISODE)
        else:
            self._directory = OwnedDirectory(tempfile.gettempdir())
        temporary = os.path.join(self._directory.path, "tmp")
        os.mkdir(self.work, 0o700)
        os.mkdir(temporary, 0o700)
        os.environ.update(HOME=self.work, TMPDIR=temporary, MPLCONFIGDIR=temporary, XDG_CACHE_HOME=temporary)

    def leftovers(self) -> list[str]:
        """What an episode left outside its directory."""
        found = []
        if self._confined:
            if os.listdir(CONFINED_PARENT) != [EPISODE]:
                found.append(f"entries in {CONFINED_PARENT}")
            found += ["entries in /dev/shm"] if traces.has_entries("/dev/shm") else []
            found += traces.ipc_objects()
        if traces.own_state() != self._own_state:
            found.append("limits, priority or affinity of the box's first process were changed")
        return found

    def oom_kills(self) -> int:
        """No cgroup, no count: a limit that is reached is a MemoryError."""
        return 0

    def leave(self) -> None:
        """Without a namespace to end with us, do it by hand."""
        if not self._confined:
            self.kill_others()
            if self._directory is not None:
                self._directory.remove()


def _drop_capabilities() -> None:
    """The change of user keeps what may be inherited. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    if libc.capset(header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")


def _kill_descendants() -> None:
    """Children, their children, and so on; orphans have become ours."""
    pending = [os.getpid()]
    while pending:
        pid = pending.pop()
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:
            found = [int(child) for child in children.read().split()]
            for child in found:
                os.kill(child, signal.SIGKILL)
            pending += found


def main() -> None:
    """Entry point of a local box: its stdin and stdout are the stream to the host."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Service(LocalBox(), 0, 1).serve()
