"""Who owns a container: a process, named so that another process of the same machine can tell whether it lives."""

from __future__ import annotations

import functools
import os
import secrets


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _start_ticks(pid: int) -> str:
    """Start time of a process in clock ticks after boot; it tells a reused pid from the first. Raises OSError."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[19]


def _machine() -> str:
    return f"{_boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}"


@functools.cache
def _name_of(pid: int) -> str:
    return f"{_machine()}/{pid}/{_start_ticks(pid)}/{secrets.token_hex(4)}"


def owner_name() -> str:
    """This process: boot, pid namespace, pid, start time, a random part."""
    return _name_of(os.getpid())


def is_gone(owner: str) -> bool:
    """Whether the owner is known to be dead. False where that cannot be told (another machine or pid namespace)."""
    boot, _, rest = owner.partition("/")
    namespace, _, rest = rest.partition("/")
    pid, _, rest = rest.partition("/")
    started = rest.partition("/")[0]
    if not pid.isdigit() or f"{boot}/{namespace}" != _machine():
        return False
    try:
        return _start_ticks(int(pid)) != started
    except OSError:
        return True
