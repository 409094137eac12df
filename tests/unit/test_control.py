"""Orders to a live run: taken from another process through the run's folder, refused in words where there is nobody."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from toolrl import presets
from toolrl.app.cli import main
from toolrl.app.control import FILE, NotLive, Say, give_order, taking_orders
from toolrl.app.run_folder import RunFolder
from toolrl.errors import RunError, UserError


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run whose path is longer than a socket's may be."""
    runs = tmp_path / ("long" * 30)
    return RunFolder.create(presets.load("quickstart-cpu", ["name=r", f"runs_dir={runs}"]))


async def add(asked: Mapping[str, Any], say: Say) -> int:
    say("adding")
    if asked["a"] < 0:
        raise UserError("a must not be negative")
    if asked["a"] == 0:
        raise RunError("lost")
    return int(asked["a"]) + int(asked["b"])


async def give(folder: RunFolder, name: str, **arguments: Any) -> tuple[Any, list[str]]:
    said: list[str] = []
    return await asyncio.to_thread(give_order, folder.path, name, arguments, said.append), said


async def test_an_order_is_carried_out_and_answered(folder: RunFolder) -> None:
    with folder.held():
        async with taking_orders(folder.path, {"add": add}):
            assert await give(folder, "add", a=1, b=2) == (3, ["adding"])
            both = await asyncio.gather(give(folder, "add", a=3, b=4), give(folder, "add", a=5, b=6))
            assert [done for done, _ in both] == [7, 11]
            with pytest.raises(UserError, match="must not be negative"):
                await give(folder, "add", a=-1)
            with pytest.raises(RunError, match="lost"):
                await give(folder, "add", a=0)
            with pytest.raises(RunError, match="KeyError"):
                await give(folder, "add", b=0)
            with pytest.raises(UserError, match="no order 'subtract'; it takes add"):
                await give(folder, "subtract")
        assert not (folder.path / FILE).exists()


async def test_an_order_goes_on_when_its_client_has_gone(folder: RunFolder) -> None:
    begun, done = asyncio.Event(), asyncio.Event()

    async def slow(asked: Mapping[str, Any], say: Say) -> None:
        begun.set()
        await asyncio.sleep(0.3)
        say("nobody hears this")
        done.set()

    async with taking_orders(folder.path, {"slow": slow}):
        found = json.loads((folder.path / FILE).read_text())
        _, writer = await asyncio.open_unix_connection(found["socket"])
        writer.write(b'{"order": "slow"}\n')
        await begun.wait()
        writer.close()
        await asyncio.wait_for(done.wait(), 5)


async def test_a_client_hears_that_the_run_ended_over_its_order(folder: RunFolder) -> None:
    async def forever(asked: Mapping[str, Any], say: Say) -> None:
        say("waiting")
        await asyncio.sleep(60)

    with folder.held():
        async with taking_orders(folder.path, {"wait": forever}):
            asking = asyncio.create_task(give(folder, "wait"))
            await asyncio.sleep(0.3)
        with pytest.raises(RunError, match="end over it"):
            await asking


async def test_what_is_no_order_harms_nobody(folder: RunFolder) -> None:
    with folder.held():
        async with taking_orders(folder.path, {"add": add}):
            found = json.loads((folder.path / FILE).read_text())
            for nonsense in (b"", b"\n", b"[1]\n", b'{"order"\n', b"x" * 100_000 + b"\n"):
                reader, writer = await asyncio.open_unix_connection(found["socket"])
                writer.write(nonsense)
                writer.write_eof()
                assert "error" in json.loads(await reader.readline())
                writer.close()
            assert (await give(folder, "add", a=1, b=1))[0] == 2


async def test_a_run_that_nobody_drives_says_how_to_go_on(folder: RunFolder) -> None:
    with pytest.raises(NotLive, match=r"not live.*toolrl train r --resume"):
        await give(folder, "add")
    with folder.held(), pytest.raises(NotLive, match="takes no orders now"):
        await give(folder, "add")
    (folder.path / FILE).write_text(json.dumps({"socket": "/gone/socket", "host": socket.gethostname(), "pid": 1}))
    with folder.held(), pytest.raises(NotLive, match="cannot be reached at /gone/socket"):  # a SIGKILL left it
        await give(folder, "add")
    (folder.path / FILE).write_text(json.dumps({"socket": "/there/socket", "host": "elsewhere", "pid": 1}))
    with folder.held(), pytest.raises(NotLive, match="machine elsewhere"):
        await give(folder, "add")


def test_scale_refuses_at_once_and_in_words(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = {
        ("scale", "quickstrat", "--rollout-workers", "2", "--runs-dir", str(folder.path.parent)): "no run 'quickstrat'",
        ("scale", str(folder.path), "--rollout-workers", "2"): "is not live",
        ("scale", str(folder.path), "--rollout-workers", "0"): "--rollout-workers",
    }
    for words, told in cases.items():
        started = time.monotonic()
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2 and time.monotonic() - started < 10
        assert told in capsys.readouterr().err
