"""The code that deletes: it refuses to run here, and does its work only on folders that a test hands to it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sandbox.image import erase, guard
from sandbox.process.owned_directory import NotOurs, OwnedDirectory


def test_the_guard_refuses_on_this_machine():
    found = "; ".join(guard.problems())
    assert "pid is" in found and "no marker file" in found
    with pytest.raises(guard.GuardRefused):
        guard.require()


def test_the_warden_does_not_start_on_this_machine():
    code = "from sandbox.image.warden import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 78 and "refusing to run outside" in done.stderr
    code = "from sandbox.image.warden import Container; Container()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "GuardRefused" in done.stderr


@pytest.mark.parametrize("path", ["/", "/tmp", "/dev/shm", "/sbx/work", "/sbx/tmp", "/sbx", ".", ""])
def test_no_path_may_be_wiped_on_this_machine(path, tmp_path):
    for candidate in (path, str(tmp_path)):
        with pytest.raises(guard.GuardRefused):
            guard.require_wipeable(candidate)


@pytest.mark.parametrize("path", ["/", "/tmp", "/dev/shm", "/sbx", "/sbx/work/", "/sbx/work/..", "work", ""])
def test_even_inside_only_the_two_listed_mounts_may_be_wiped(path, monkeypatch):
    monkeypatch.setattr(guard, "require", lambda: None)
    with pytest.raises(guard.GuardRefused, match="not on the list"):
        guard.require_wipeable(path)
    for listed in guard.WIPED_MOUNTS:
        with pytest.raises(guard.GuardRefused, match="not a tmpfs mount"):
            guard.require_wipeable(listed)


def test_mount_points_are_read_from_mountinfo():
    mountinfo = (
        "22 1 0:20 / / ro,relatime - overlay overlay rw\n"
        "23 22 0:21 / /sbx/work rw,nosuid shared:1 master:2 - tmpfs tmpfs rw,size=1m\n"
        "24 22 0:22 / /sbx/tmp rw - ext4 /dev/x rw\n"
    )
    assert guard.tmpfs_mounts(mountinfo) == {"/sbx/work"}


def make_a_mess(top: Path, outside: Path) -> None:
    """Nested deeper than a path can be, without permissions, with links out, with odd names."""
    fd = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    (top / "closed").mkdir()
    (top / "closed" / "inner").mkdir()
    (top / "closed" / "inner" / "file").write_text("x")
    (top / "closed" / "inner").chmod(0)
    (top / "closed").chmod(0)
    (top / "link").symlink_to(outside)
    (top / "etc").symlink_to("/etc")
    (top / "dangling").symlink_to("/nowhere")
    os.link(outside / "kept", top / "hard")
    os.mkfifo(top / "fifo")
    Path(os.fsdecode(os.fsencode(top) + b"/\xff\n")).write_text("odd")
    for number in range(300):
        (top / f"many{number}").write_text("")


@pytest.fixture
def memory_path(tmp_path):
    """A folder on a tmpfs, as inside a box, where there is one: 3,000 nested folders take seconds on a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def outside(memory_path):
    folder = memory_path / "outside"
    folder.mkdir()
    (folder / "kept").write_text("kept")
    return folder


def test_the_wardens_eraser_empties_the_folder_it_is_given_and_nothing_else(memory_path, outside):
    top = memory_path / "top"
    top.mkdir()
    make_a_mess(top, outside)
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert erase.empty_directory(fd) == 3002
    finally:
        os.close(fd)
    assert os.listdir(top) == []
    assert (outside / "kept").read_text() == "kept"


def test_an_owned_directory_is_removed_whatever_is_in_it(memory_path, outside):
    owned = OwnedDirectory(str(memory_path), "owned")
    make_a_mess(Path(owned.path), outside)
    owned.remove()
    assert not os.path.exists(owned.path)
    assert (outside / "kept").read_text() == "kept"


def test_an_owned_directory_refuses_what_it_did_not_make(memory_path, outside):
    with pytest.raises(FileExistsError):
        OwnedDirectory(str(memory_path), "outside")
    owned = OwnedDirectory(str(memory_path), "owned")
    os.rename(owned.path, memory_path / "elsewhere")
    os.rename(outside, owned.path)
    with pytest.raises(NotOurs):
        owned.remove()
    assert (memory_path / "owned" / "kept").read_text() == "kept"
    os.rename(owned.path, outside)
    os.symlink(outside, owned.path)
    with pytest.raises(NotOurs):
        owned.remove()
    assert (outside / "kept").read_text() == "kept"
