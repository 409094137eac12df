"""PID 1 of the sandbox container: owns the channel to the host, forks interpreters, kills, reaps, wipes.

Refuses to start anywhere else (`guard`). Not dumpable, so code of the same uid cannot open its descriptors, memory or
environment.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from typing import Any

from sandbox.image import erase, guard
from sandbox.inside import seccomp, traces
from sandbox.inside.interpreter import prctl_dumpable
from sandbox.inside.service import Service

EXIT_GUARD = 78
_MEMORY_EVENTS = (
    ("/sys/fs/cgroup/memory.events", "oom_kill "),  # cgroup v2
    ("/sys/fs/cgroup/memory/memory.oom_control", "oom_kill "),  # v1
)


class Container:
    """What the service asks of the container around it."""

    work = guard.WIPED_MOUNTS[0]

    def __init__(self) -> None:
        guard.require()
        self._address_space = 0
        self._own_state = traces.own_state()
        # Wherever this uid may write: gVisor has a /tmp of its own, for one.
        writable = {path for path in guard.tmpfs_mounts() if os.path.isdir(path) and os.access(path, os.W_OK)}
        self._folders = sorted({*guard.WIPED_MOUNTS, "/dev/shm", "/dev/mqueue", *writable})

    def open(self, settings: dict[str, Any]) -> None:
        """Keep what a fresh child is told; the engine has made the mounts."""
        self._address_space = int(settings["address_space_mib"]) * 2**20

    def enter(self) -> None:
        """Sets the limits of a fresh child."""
        # Inside a container niceness counts only among its own processes: pid 1 stays quick whatever the cell starts.
        os.nice(10)
        if self._address_space:
            # gVisor's kernel lives on the box's memory and dies with it: a cell is to meet its limit before that.
            resource.setrlimit(resource.RLIMIT_AS, (self._address_space, self._address_space))

    def kill_others(self) -> None:
        """Kill every process of the container but this one; the kernel signals all at once, so a fork bomb cannot
        outrun it."""
        guard.require()
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        # Orphans become children of pid 1, so no child left means no process left.
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def wipe(self) -> None:
        """Empty the image's own tmpfs mounts."""
        for path in guard.WIPED_MOUNTS:
            guard.require_wipeable(path)
            top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                erase.empty_directory(top)
            finally:
                os.close(top)

    def leftovers(self) -> list[str]:
        """What an episode can leave that is not wiped here: such a box is destroyed, never cleaned."""
        found = [f"entries in {path}" for path in self._folders if traces.has_entries(path)] + traces.ipc_objects()
        if traces.own_state() != self._own_state:
            found.append("limits, priority or affinity of the warden were changed")
        return found

    def oom_kills(self) -> int:
        """The cgroup's count of kills for memory; 0 where it is not shown."""
        for path, key in _MEMORY_EVENTS:
            with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as events:
                for line in events:
                    if line.startswith(key):
                        return int(line.split()[1])
        return 0

    def leave(self) -> None:
        """The end of pid 1 ends everything in the container."""


def main() -> None:
    """Entry point of the image."""
    try:
        guard.require()
    except guard.GuardRefused as refused:
        print(refused, file=sys.stderr)
        raise SystemExit(EXIT_GUARD) from None
    prctl_dumpable(0)
    seccomp.install()
    # Without handlers the kernel drops every signal that comes from inside.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Service(Container(), 0, 1).serve()
