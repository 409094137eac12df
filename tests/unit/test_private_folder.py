"""Folders of processes: gone with them, and those of the killed are removed by the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from toolrl import private_folder
from toolrl.private_folder import PREFIX, remove_orphans

OWNER = """
import time
from toolrl.private_folder import private_folder
with private_folder() as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(private_folder.tempfile, "tempdir", None)
    monkeypatch.setattr(private_folder, "SETTLED_S", 0.0)
    return tmp_path


def test_a_folder_is_private_and_goes_with_its_context(place: Path) -> None:
    with private_folder.private_folder() as folder:
        assert folder.parent == place and folder.stat().st_mode & 0o777 == 0o700
        (folder / "content").write_text("x")
        assert remove_orphans() == []  # its owner lives
        assert folder.exists()
    assert list(place.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(place: Path) -> None:
    owners = [subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        dead, living = (Path(owner.stdout.readline().strip()) for owner in owners)  # type: ignore[union-attr]
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait()
        assert (dead / "socket").exists()
        with private_folder.private_folder():
            assert not dead.exists() and (living / "socket").exists()
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()
    assert remove_orphans() == [living]


def test_what_is_young_or_open_to_others_or_a_link_is_left_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (place / f"{PREFIX}link").symlink_to(elsewhere)
    (place / f"{PREFIX}file").touch()
    (place / f"{PREFIX}shared").mkdir(mode=0o755)
    os.mkdir(place / f"{PREFIX}other", 0o700)
    monkeypatch.setattr(private_folder, "SETTLED_S", 60.0)
    assert remove_orphans() == []
    monkeypatch.setattr(private_folder, "SETTLED_S", 0.0)
    assert remove_orphans() == [place / f"{PREFIX}other"]
    assert (elsewhere / "precious").exists()
