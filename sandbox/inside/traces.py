"""What an episode can leave in a box besides processes and files. Looks only; a box with such traces is destroyed,
never cleaned."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Any

_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


def own_state() -> tuple[Any, ...]:
    """What a process of the same uid can change of this one."""
    limits = tuple(resource.getrlimit(limit) for limit in _LIMITS)
    return limits, os.getpriority(os.PRIO_PROCESS, 0), frozenset(os.sched_getaffinity(0)), os.sched_getscheduler(0)


def has_entries(path: str) -> bool:
    """Whether a folder is not empty; a folder that cannot be looked into counts as not empty, one that is not there
    as empty."""
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is not None
    except FileNotFoundError:
        return False
    except OSError:
        return True


def ipc_objects() -> list[str]:
    """System V objects of this IPC namespace, by kind."""
    found = []
    for kind in ("shm", "sem", "msg"):
        with contextlib.suppress(OSError), open(f"/proc/sysvipc/{kind}", "rb") as table:
            if table.read().count(b"\n") > 1:
                found.append(f"System V {kind} objects")
    return found
