"""A folder in the temporary directory for what a process needs under a path, and that must not outlive it.

Invariants:
- Only its user can look into it. Its owner holds a lock (`flock`) on the folder itself, which the kernel drops when the owner
  ends, however it ends.
- Whoever makes a folder first removes those whose owner is gone. A folder that is locked, that is another user's, or that
  is younger than `SETTLED_S` (its owner may not have got to the lock yet) is left alone; links are not followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "toolrl-run-"
SETTLED_S = 60.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new empty folder, removed at the end of the context."""
    remove_orphans()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(folder, _FOLDER)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_orphans() -> list[Path]:
    """Removes the folders of this user's processes that are gone; returns them."""
    return [folder for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")) if _removed(folder)]


def _removed(folder: Path) -> bool:
    try:
        lock = os.open(folder, _FOLDER)
    except OSError:  # gone meanwhile, another user's, or no folder
        return False
    try:
        found = os.fstat(lock)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
            return False
        if time.time() - found.st_ctime < SETTLED_S:
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
