"""Memory that the processes of one host share: written by a learner or a receiver, read by workers and their engines.

A *slot* holds one publication: a head, and buckets of bytes. Each is a `memfd`, anonymous memory that other processes of
the same user open under `/proc/PID/fd/N`.

Invariants:
- Nothing is left behind: the kernel frees the memory when owner and readers are gone, however they ended; no file ever
  lies in `/dev/shm`.
- Nobody reads what is being written: a reader holds a shared lock on the head, the writer an exclusive one; the kernel
  drops the lock of a process that dies.
- The latest publication is not overwritten. Another slot is used again once no one reads it: its pages are in place, so
  filling it costs no page fault. A reader that keeps one for long costs one more slot.
- The head's stamp tells a reader that the slot still holds the publication that it was sent for.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

STAMP_BYTES = 16


class NoSharedMemory(OSError):
    """The machine has no memory for the weights."""


class SlotGone(OSError):
    """The slot's owner is gone, or has overwritten it."""


class Memory:
    """`capacity` bytes that other processes can open by `path`; they are taken from the machine when first written."""

    def __init__(self, capacity: int) -> None:
        self.fd = os.memfd_create("toolrl-weights")
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, capacity)
        self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        self.content = np.frombuffer(mmap.mmap(self.fd, capacity), dtype=np.uint8)
        self._taken = 0

    def room(self, offset: int, nbytes: int) -> np.ndarray:
        """[nbytes] to be written.

        Raises:
            NoSharedMemory: the machine does not have them. Without this check the kernel would kill the process.
        """
        end = offset + nbytes
        if end > self._taken:
            needed, free = end - self._taken, available_bytes()
            if needed > free:
                raise NoSharedMemory(
                    f"no memory for {needed >> 20} MiB of weights, {free >> 20} MiB are free on this machine: use one with "
                    "more memory, or start fewer engines on it (two versions of the weights are held at a time)"
                )
            self._taken = end
        return self.content[offset:end]


class Slot:
    """One publication's memory."""

    def __init__(self) -> None:
        self.head = Memory(mmap.PAGESIZE)
        self.buckets: list[Memory] = []

    def bucket(self, index: int, capacity: int) -> Memory:
        """The bucket at `index`, of `capacity` bytes or more; one that is too small makes way for a new one."""
        if index == len(self.buckets):
            self.buckets.append(Memory(capacity))
        elif self.buckets[index].content.nbytes < capacity:
            self.buckets[index] = Memory(capacity)
        return self.buckets[index]


class Slots:
    """One writer's slots."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._latest: Slot | None = None

    def __len__(self) -> int:
        return len(self._slots)

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[Slot, bytes]]:
        """A slot that no one reads, and the stamp that it has after the block; an error leaves it without one."""
        slot, stamp = self._free(), secrets.token_bytes(STAMP_BYTES)
        try:
            slot.head.content[:STAMP_BYTES] = 0
            yield slot, stamp
            slot.head.content[:STAMP_BYTES] = np.frombuffer(stamp, dtype=np.uint8)
            self._latest = slot
        finally:
            fcntl.flock(slot.head.fd, fcntl.LOCK_UN)

    def _free(self) -> Slot:
        for slot in self._slots:
            if slot is not self._latest and _lock(slot.head.fd, fcntl.LOCK_EX):
                return slot
        slot = Slot()
        fcntl.flock(slot.head.fd, fcntl.LOCK_EX)
        self._slots.append(slot)
        return slot


@contextlib.contextmanager
def reading(head: str, stamp: bytes) -> Iterator[None]:
    """Inside, the slot with this head holds what `stamp` stands for.

    Raises:
        SlotGone: it does not any more.
    """
    fd = _opened(head)
    try:
        if not _lock(fd, fcntl.LOCK_SH) or os.pread(fd, STAMP_BYTES, 0) != stamp:
            raise SlotGone(f"{head} has been overwritten with a later version")
        yield
    finally:
        os.close(fd)


def mapped(path: str, nbytes: int) -> np.ndarray:
    """[nbytes] uint8, read-only, every page in place. Outlives the owner, and shows what is written there later."""
    fd = _opened(path)
    try:
        if os.fstat(fd).st_size < nbytes:
            raise SlotGone(f"{path} is gone with its owner (what lies there is too short)")
        area = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
    finally:
        os.close(fd)
    return np.frombuffer(area, dtype=np.uint8)


def identity(path: str) -> int:
    """A number that another memory at the same path does not have: descriptors and process ids are given out again."""
    try:
        return os.stat(path).st_ino
    except OSError as error:
        raise SlotGone(f"{path} is gone with its owner ({error.strerror})") from error


def available_bytes() -> int:
    """Memory that may be taken without swapping, as the kernel sees it."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 1 << 62


def _opened(path: str) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be another process's pipe by now
    except OSError as error:
        raise SlotGone(f"{path} is gone with its owner ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SlotGone(f"{path} is gone with its owner (something else lies there)")
    return fd


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
