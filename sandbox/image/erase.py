"""Empties a folder that is already open. Which folder that may be is decided in `guard`; this module knows no path.

Iterative, with two descriptors whatever the depth. Links are removed, never followed; the way back up is checked against
the way down. Nobody else may be writing (the warden has killed everyone before).
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass
class _Level:
    """A folder on the way down: which one it is, and its folders that are still to go."""

    identity: tuple[int, int]  # device, inode
    folders: list[str]


def _unlink_files(folder: int, device: int) -> _Level:
    """Remove what is no folder, and say what remains. Raises OSError on another device."""
    here = os.fstat(folder)
    if here.st_dev != device:
        raise OSError("a folder below is on another file system")
    folders = []
    for name in os.listdir(folder):
        if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            folders.append(name)
        else:
            os.unlink(name, dir_fd=folder)
    return _Level((here.st_dev, here.st_ino), folders)


def empty_directory(top: int) -> int:
    """Remove everything below the open folder `top`, and its extended attributes. Returns how many folders went."""
    os.fchmod(top, 0o700)
    for name in os.listxattr(top):
        with contextlib.suppress(OSError):
            os.removexattr(top, name)
    folder, removed, device = os.dup(top), 0, os.fstat(top).st_dev
    try:
        level, above = _unlink_files(folder, device), list[_Level]()
        while level.folders or above:
            if level.folders:
                name = level.folders[-1]
                os.chmod(name, 0o700, dir_fd=folder)
                folder = _move(folder, name)
                above.append(level)
                level = _unlink_files(folder, device)
            else:
                folder = _move(folder, "..")
                level = above.pop()
                here = os.fstat(folder)
                if (here.st_dev, here.st_ino) != level.identity:
                    raise OSError("the folder above is not the one that was left")
                os.rmdir(level.folders.pop(), dir_fd=folder)
                removed += 1
    finally:
        os.close(folder)
    os.utime(top, (0, 0))
    return removed


def _move(folder: int, name: str) -> int:
    """Open `name` in place of `folder`."""
    there = os.open(name, _DIRECTORY, dir_fd=folder)
    os.close(folder)
    return there
