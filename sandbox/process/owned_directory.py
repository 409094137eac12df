"""A directory that this process made, and the only thing the process backend ever deletes.

The directory is known by device and inode from the moment it is made; where the path leads to anything else by then,
removal refuses. Every step is relative to open folders and follows no link; depth and modes do not matter.
"""

from __future__ import annotations

import os
import stat
import tempfile
from typing import NamedTuple

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Entered(NamedTuple):
    identity: tuple[int, int]  # device, inode
    folders: list[str]  # still to be removed


class NotOurs(Exception):
    """The path does not lead to the directory that was made."""


class OwnedDirectory:
    """Made by the constructor, removed by `remove`."""

    def __init__(self, parent: str, name: str | None = None) -> None:
        """Make `parent/name`, which must not exist, or a directory of an unused name in `parent`."""
        if name is None:
            self.path = tempfile.mkdtemp(prefix="toolrl-box-", dir=parent)
        else:
            self.path = os.path.join(parent, name)
            os.mkdir(self.path, 0o700)
        made = os.lstat(self.path)
        self._identity = (made.st_dev, made.st_ino)

    def remove(self) -> None:
        """Remove the directory and all below it. Raises NotOurs, OSError. All who could write there must be dead."""
        parent, name = os.path.split(self.path)
        above = os.open(parent, _FOLDER)
        try:
            found = os.lstat(name, dir_fd=above)
            if (found.st_dev, found.st_ino) != self._identity or not stat.S_ISDIR(found.st_mode):
                raise NotOurs(f"{self.path} is not the directory that was made here")
            os.chmod(name, 0o700, dir_fd=above)
            top = os.open(name, _FOLDER, dir_fd=above)
            try:
                if os.fstat(top).st_ino != self._identity[1]:
                    raise NotOurs(f"{self.path} changed while it was opened")
                self._remove_below(top)
            finally:
                os.close(top)
            os.rmdir(name, dir_fd=above)
        finally:
            os.close(above)

    def _remove_below(self, top: int) -> None:
        """Goes down into the last folder there is and, where there is none, back up to remove the one it came from."""
        here, trail = os.dup(top), [self._enter(top)]
        try:
            while trail[0].folders or len(trail) > 1:
                if trail[-1].folders:
                    name = trail[-1].folders[-1]
                    os.chmod(name, 0o700, dir_fd=here)
                    here = _step(here, name)
                    trail.append(self._enter(here))
                else:
                    trail.pop()
                    here = _step(here, "..")
                    above = os.fstat(here)
                    if (above.st_dev, above.st_ino) != trail[-1].identity:
                        raise NotOurs(f"a folder below {self.path} was moved while it was removed")
                    os.rmdir(trail[-1].folders.pop(), dir_fd=here)
        finally:
            os.close(here)

    def _enter(self, folder: int) -> _Entered:
        """Remove what is no folder from an open folder of ours."""
        here = os.fstat(folder)
        if here.st_dev != self._identity[0]:
            raise NotOurs(f"a folder below {self.path} is a mount of another file system")
        entered = _Entered((here.st_dev, here.st_ino), [])
        for name in os.listdir(folder):
            if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                entered.folders.append(name)
            else:
                os.unlink(name, dir_fd=folder)
        return entered


def _step(folder: int, name: str) -> int:
    """Open `name` in place of `folder`."""
    there = os.open(name, _FOLDER, dir_fd=folder)
    os.close(folder)
    return there
