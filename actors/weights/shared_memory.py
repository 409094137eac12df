"""Buckets of a publication as files in shared memory, from a worker's process to its engine's processes.

Invariants:
- The files live as long as the `with` block; a process that was killed leaves some, and the next one to stage removes
  them.
- Only the owner can read or write them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

PREFIX = "toolrl-weights"
_NAME = re.compile(rf"{PREFIX}-(\d+)-[0-9a-f]+-\d+")


class NoSharedMemory(OSError):
    """The buckets do not fit."""


def shared_memory_folder() -> Path:
    """`/dev/shm` where there is one, else the folder for temporary files (slower: it may be on a disk)."""
    folder = Path("/dev/shm")
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


@contextlib.contextmanager
def staged(buckets: Sequence[np.ndarray], folder: Path | None = None) -> Iterator[list[str]]:
    """Paths of files that hold `buckets`.

    Raises:
        NoSharedMemory: with how much is needed and how much is free.
    """
    folder = shared_memory_folder() if folder is None else folder
    remove_orphans(folder)
    name = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(8)}"
    paths = [folder / f"{name}-{index}" for index in range(len(buckets))]
    try:
        for path, bucket in zip(paths, buckets, strict=True):
            _write(path, bucket)
        yield [str(path) for path in paths]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _write(path: Path, bucket: np.ndarray) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            os.posix_fallocate(descriptor, 0, max(1, bucket.nbytes))  # says now what a later page fault would kill for
            rest = memoryview(bucket)  # type: ignore[arg-type]
            while len(rest):
                rest = rest[file.write(rest) :]
    except OSError as error:
        status = os.statvfs(path.parent)
        raise NoSharedMemory(
            f"cannot write {bucket.nbytes >> 20} MiB of weights to {path.parent} ({error.strerror}); "
            f"{status.f_bavail * status.f_frsize >> 20} MiB are free there: make it larger (docker run --shm-size, "
            "an emptyDir of medium Memory), or use fewer engines on this machine"
        ) from error


def mapped(path: str) -> torch.Tensor:
    """[bytes] uint8, a private mapping of a staged file: nothing is copied, and writing to it changes no one else's."""
    return torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)


def remove_orphans(folder: Path) -> None:
    """Removes the files of processes that are gone."""
    for entry in os.scandir(folder):
        match = _NAME.fullmatch(entry.name)
        if match and not _alive(int(match[1])):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                os.unlink(entry.path)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
