"""Refuses to run the warden anywhere but inside its own container.

A prototype's reset code, started once outside its container as root, emptied the host's folders. So the warden needs
all of: pid 1, a uid that is not 0, the marker file of the image, a read-only root. There is no option that relaxes
this.
"""

from __future__ import annotations

import os
from typing import NamedTuple

MARKER_PATH = "/sbx/.toolrl-warden"
MARKER_TEXT = "toolrl sandbox image: the warden may run here\n"
# The only folders the warden ever empties, and only where each is a tmpfs mount of its own.
WIPED_MOUNTS = ("/sbx/work", "/sbx/tmp")


class GuardRefused(Exception):
    """This is not the inside of the sandbox's container."""


def problems() -> list[str]:
    """Every reason why this process is not a warden in its container; empty inside."""
    found = []
    if os.getpid() != 1:
        found.append(f"pid is {os.getpid()}, not 1")
    if 0 in (os.getuid(), os.geteuid()):
        found.append("uid is 0")
    try:
        with open(MARKER_PATH, encoding="utf-8") as marker:
            if marker.read() != MARKER_TEXT:
                found.append(f"{MARKER_PATH} has another text")
    except OSError as error:
        found.append(f"no marker file {MARKER_PATH}: {error.strerror}")
    if not _root_is_read_only():
        found.append("the root file system is writable")
    return found


def _root_is_read_only() -> bool:
    if os.statvfs("/").f_flag & os.ST_RDONLY:
        return True
    # gVisor's statvfs knows no such flag; its list of mounts does.
    return "ro" in [mount for mount in mounts() if mount.path == "/"][-1].options


def require() -> None:
    """Raise GuardRefused unless this is the warden inside its container."""
    found = problems()
    if found:
        raise GuardRefused("refusing to run outside the sandbox container: " + "; ".join(found))


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    path: str
    options: list[str]
    kind: str


def mounts(mountinfo: str | None = None) -> list[Mount]:
    """What is mounted, in order, as this process's /proc/self/mountinfo (or the given text) tells."""
    if mountinfo is None:
        with open("/proc/self/mountinfo", encoding="utf-8") as file:
            mountinfo = file.read()
    found = []
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if "-" in fields:
            found.append(Mount(fields[4], fields[5].split(","), fields[fields.index("-") + 1]))
    return found


def tmpfs_mounts(mountinfo: str | None = None) -> set[str]:
    """Mount points of type tmpfs."""
    return {mount.path for mount in mounts(mountinfo) if mount.kind == "tmpfs"}


def require_wipeable(path: str) -> None:
    """Raise GuardRefused unless `path` is one of the image's own tmpfs mounts and this is the warden inside its
    container."""
    require()
    if path not in WIPED_MOUNTS:
        raise GuardRefused(f"{path!r} is not on the list of folders that may be emptied: {WIPED_MOUNTS}")
    if path not in tmpfs_mounts():
        raise GuardRefused(f"{path} is not a tmpfs mount point")
