"""A directory that this process made, and the only thing the process backend ever deletes.

The directory is known by device and inode from the moment it is made; where the path leads to anything else by then,
removal refuses. Every step is relative to open folders and follows no link; depth and modes do not matter.
"""

from __future__ import annotations

import os
import stat
import tempfile

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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
        """Flattens: what a folder holds moves to the top, then the folder, empty, goes. Two descriptors at most."""
        token, moved = os.urandom(8).hex(), 0
        names = os.listdir(top)
        while names:
            name = names.pop()
            entry = os.lstat(name, dir_fd=top)
            if not stat.S_ISDIR(entry.st_mode):
                os.unlink(name, dir_fd=top)
                continue
            if entry.st_dev != self._identity[0]:
                raise NotOurs(f"{name!r} in {self.path} is a mount of another file system")
            os.chmod(name, 0o700, dir_fd=top)
            folder = os.open(name, _FOLDER, dir_fd=top)
            try:
                for inner in os.listdir(folder):
                    if not stat.S_ISDIR(os.lstat(inner, dir_fd=folder).st_mode):
                        os.unlink(inner, dir_fd=folder)
                        continue
                    os.chmod(inner, 0o700, dir_fd=folder)  # its `..` is about to change
                    names.append(f"{token}-{moved}")
                    os.rename(inner, names[-1], src_dir_fd=folder, dst_dir_fd=top)
                    moved += 1
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)
