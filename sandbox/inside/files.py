"""Files of the work folder, for upload, list and download. Every step is relative to an open folder and follows no
link."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_LISTED = 1000
MAX_DEPTH = 16


class FileRefused(Exception):
    """The name, kind or size of a file is not acceptable; the message is for the caller."""


def checked_parts(name: str) -> list[str]:
    """The components of a relative path inside the work folder. Raises FileRefused."""
    parts = name.split("/")
    if not name or "\0" in name or len(parts) > MAX_DEPTH or any(part in ("", ".", "..") for part in parts):
        raise FileRefused(f"{name!r} is no relative path inside the work folder")
    if any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in parts):
        raise FileRefused("a component of the path is longer than 255 bytes")
    return parts


def _open_parent(work: str, parts: list[str], create: bool) -> int:
    folder = os.open(work, _DIRECTORY)
    for part in parts[:-1]:
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=folder)
            inner = os.open(part, _DIRECTORY, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return folder


def put(work: str, name: str, data: bytes) -> None:
    """Write a file, in place of what had the name. Raises FileRefused, OSError."""
    parts = checked_parts(name)
    folder = _open_parent(work, parts, create=True)
    try:
        fd = os.open(
            parts[-1], os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder
        )
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FileRefused(f"{name!r} is not a regular file")
            os.ftruncate(fd, 0)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
    finally:
        os.close(folder)


def get(work: str, name: str, max_bytes: int) -> bytes:
    """Read a file. Raises FileRefused, OSError."""
    parts = checked_parts(name)
    folder = _open_parent(work, parts, create=False)
    try:
        fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise FileRefused(f"{name!r} is not a regular file")
        if found.st_size > max_bytes:
            raise FileRefused(f"{name!r} has {found.st_size} bytes, the limit is {max_bytes}")
        return file.read(max_bytes)


def listing(work: str) -> list[dict[str, Any]]:
    """Regular files below the work folder, at most MAX_LISTED of them and MAX_DEPTH deep; links are not listed."""
    found: list[dict[str, Any]] = []
    pending = [""]
    while pending and len(found) < MAX_LISTED:
        prefix = pending.pop()
        try:
            folder = _open_parent(work, [*filter(None, prefix.split("/")), ""], create=False)
        except OSError:
            continue
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if len(found) >= MAX_LISTED:
                        break
                    path = prefix + entry.name
                    if entry.is_file(follow_symlinks=False):
                        size = entry.stat(follow_symlinks=False).st_size
                        found.append({"name": path.encode("utf-8", "backslashreplace").decode(), "size": size})
                    elif entry.is_dir(follow_symlinks=False) and path.count("/") < MAX_DEPTH:
                        pending.append(path + "/")
        except OSError:
            continue
        finally:
            os.close(folder)
    return sorted(found, key=lambda file: file["name"])
