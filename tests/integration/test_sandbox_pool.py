"""The pool on real backends: who waits, what is replaced, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from sandbox import PoolExhausted, SandboxConfig, SandboxPool, SandboxUnavailable, available_backend, reap
from sandbox.reaper import list_boxes
from tests.requirements import need

ENOUGH_S = 30.0
LOCAL = {"backend": "process", "timeout_s": ENOUGH_S, "confinement": "auto"}


async def eventually(condition, deadline_s: float = 10.0) -> bool:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if condition():
            return True
        await asyncio.sleep(0.02)
    return bool(condition())


async def test_waiters_are_served_in_turn_and_boxes_reused():
    config = SandboxConfig(**LOCAL, min_sessions=1, max_sessions=2)

    async def episode(number: int) -> str | None:
        async with await pool.acquire(episode_id=f"e{number}") as session:
            assert "NameError" in (await session.run("x")).stderr
            return (await session.run(f"x = {number}\nx * x")).value

    async with SandboxPool(config) as pool:
        values = await asyncio.gather(*(episode(number) for number in range(30)))
        stats = pool.stats()
        assert values == [str(number * number) for number in range(30)]
        assert stats.created <= 2 and stats.acquired == 30 and stats.runs == {"ok": 30, "error": 30}
        assert await eventually(lambda: pool.stats().idle == 2)


async def test_acquire_gives_up_at_its_deadline_and_when_too_many_wait():
    async with SandboxPool(SandboxConfig(**LOCAL, min_sessions=1, max_sessions=1, max_waiters=1)) as pool:
        held = await pool.acquire(episode_id="held")
        start = time.monotonic()
        with pytest.raises(PoolExhausted, match="1 of 1 in use"):
            await pool.acquire(episode_id="late", deadline_s=0.2)
        assert 0.2 <= time.monotonic() - start < 5
        waiting = asyncio.create_task(pool.acquire(episode_id="waits"))
        await asyncio.sleep(0.02)
        with pytest.raises(PoolExhausted, match="others wait"):
            await pool.acquire(episode_id="too many")
        await held.release()
        await (await waiting).release()


async def test_a_waiter_that_gives_up_loses_no_box():
    async with SandboxPool(SandboxConfig(**LOCAL, min_sessions=1, max_sessions=1)) as pool:
        for _ in range(5):
            held = await pool.acquire(episode_id="held")
            waiting = asyncio.create_task(pool.acquire(episode_id="waits"))
            await asyncio.sleep(0)
            await held.release()
            await asyncio.sleep(0.003)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            if not waiting.cancelled():
                await waiting.result().release()
        async with await pool.acquire(episode_id="last", deadline_s=ENOUGH_S) as session:
            assert (await session.run("1")).value == "1"
        assert pool.stats().created == 1


async def test_a_box_is_retired_after_its_uses():
    async with SandboxPool(SandboxConfig(**LOCAL, min_sessions=1, max_sessions=1, uses_per_box=3)) as pool:
        for _ in range(7):
            async with await pool.acquire(episode_id="e") as session:
                assert (await session.run("1")).status == "ok"
        assert await eventually(lambda: pool.stats().destroyed == 2 and pool.stats().idle == 1)


async def test_episodes_on_one_box_draw_different_numbers_unless_seeded_alike():
    config = SandboxConfig(**LOCAL, min_sessions=1, max_sessions=1, preimport=("numpy",))

    async def draw(seed: int | None) -> str | None:
        async with await pool.acquire(episode_id="e", seed=seed) as session:
            return (await session.run("import numpy, random\n(float(numpy.random.rand()), random.random())")).value

    async with SandboxPool(config) as pool:
        assert len({await draw(None) for _ in range(4)}) == 4
        assert await draw(7) == await draw(7) != await draw(8)


async def test_runs_that_are_cancelled_at_any_moment_disturb_nobody():
    async with SandboxPool(SandboxConfig(**LOCAL, min_sessions=1, max_sessions=1)) as pool:
        for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01):
            session = await pool.acquire(episode_id="e")
            running = asyncio.create_task(session.run("import time\ntime.sleep(20)", timeout_s=ENOUGH_S))
            await asyncio.sleep(delay_s)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await session.release()
        async with await pool.acquire(episode_id="last", deadline_s=5) as session:
            assert (await session.run("1")).value == "1"
        assert pool.stats().created == 1


async def test_boxes_beyond_the_minimum_end_when_nobody_wants_them():
    async with SandboxPool(SandboxConfig(**LOCAL, min_sessions=1, max_sessions=3, idle_s=0.5)) as pool:
        sessions = await asyncio.gather(*(pool.acquire(episode_id=f"e{number}") for number in range(3)))
        for session in sessions:
            await session.release()
        assert await eventually(lambda: pool.stats().idle == 3 or pool.stats().destroyed)
        assert await eventually(lambda: pool.stats().destroyed == 2 and pool.stats().idle == 1)
        assert pool.stats().created == 3


async def test_creation_that_keeps_failing_is_refused_at_once_for_a_while():
    config = SandboxConfig(
        **LOCAL,
        min_sessions=0,
        max_sessions=2,
        preimport=("no_such_module",),
        breaker_failures=2,
        breaker_cooldown_s=30,
    )
    async with SandboxPool(config) as pool:
        with pytest.raises(SandboxUnavailable, match="no_such_module"):
            await pool.acquire(episode_id="first")
        start = time.monotonic()
        with pytest.raises(SandboxUnavailable, match="no_such_module"):
            await pool.acquire(episode_id="second")
        assert time.monotonic() - start < 1
        assert pool.stats().create_failures == 2


async def test_a_pool_that_cannot_start_says_why():
    with pytest.raises(SandboxUnavailable, match="no_such_module"):
        async with SandboxPool(SandboxConfig(**LOCAL, preimport=("no_such_module",))):
            pass


async def test_many_trivial_runs_at_once_wait_apart_from_running():
    async with SandboxPool(SandboxConfig(**LOCAL, min_sessions=4, max_sessions=4, max_concurrent_runs=2)) as pool:
        sessions = [await pool.acquire(episode_id=f"e{number}") for number in range(4)]
        results = await asyncio.gather(*(sessions[number % 4].run(f"{number}") for number in range(128)))
        assert [result.value for result in results] == [str(number) for number in range(128)]
        assert max(result.queue_s for result in results) > max(result.wall_s for result in results) / 10
        for session in sessions:
            await session.release()


async def test_close_ends_boxes_that_are_in_use():
    pool = SandboxPool(SandboxConfig(**LOCAL, min_sessions=1, max_sessions=1))
    await pool.__aenter__()
    session = await pool.acquire(episode_id="e")
    running = asyncio.create_task(session.run("import time\ntime.sleep(60)", timeout_s=90))
    await asyncio.sleep(0.1)
    await pool.close()
    assert (await running).status == "infra_error"
    assert (await session.run("1")).status == "infra_error"
    with pytest.raises(SandboxUnavailable):
        await pool.acquire(episode_id="late")


def test_the_backend_is_named_with_a_reason(monkeypatch):
    name, why = available_backend(SandboxConfig(backend="process", confinement="none"))
    assert name == "process" and "no security boundary" in why
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    name, why = available_backend(SandboxConfig(backend="auto"))
    assert name == "process" and "Docker" in why
    with pytest.raises(SandboxUnavailable, match="no Docker engine answers"):
        available_backend(SandboxConfig(backend="docker"))


def test_a_missing_image_is_named_with_its_remedy():
    need("docker")
    with pytest.raises(SandboxUnavailable, match=r"python -m sandbox\.image --tag no-such-image:1"):
        available_backend(SandboxConfig(backend="docker", image="no-such-image:1"))


OWNER = """
import asyncio, sys
from sandbox import SandboxConfig, SandboxPool
async def main():
    config = SandboxConfig(backend=sys.argv[1], confinement=sys.argv[2], min_sessions=2, max_sessions=2, run=sys.argv[3])
    async with SandboxPool(config) as pool:
        session = await pool.acquire(episode_id="e")
        asyncio.create_task(session.run("import os\\nos.system('sleep 88.25 &')\\nwhile True: pass", timeout_s=60))
        await asyncio.sleep(0.5)
        print("ready", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def count_sleepers() -> int:
    """Processes that the owner's cell has left, whoever their parent is by now."""
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                found += file.read() == b"sleep\x0088.25\x00"
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("backend", "confinement"), [("docker", "auto"), ("process", "bubblewrap"), ("process", "none")]
)
def test_a_killed_owner_leaves_nothing(backend, confinement, tmp_path, monkeypatch):
    if confinement != "none":
        need("docker" if backend == "docker" else "bubblewrap")
    run = f"killed-{os.getpid()}"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, backend, confinement, run], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
        assert count_sleepers() == 1
        if backend == "docker":
            assert len(list_boxes(run)) == 2
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    start = time.monotonic()
    while count_sleepers() or (backend == "docker" and list_boxes(run)):
        assert time.monotonic() - start < 8, "still there"  # 2 s on a machine with nothing else to do
        time.sleep(0.05)
    assert os.listdir(tmp_path) == []


async def test_the_reaper_takes_orphans_and_leaves_boxes_of_living_owners(monkeypatch):
    need("docker")
    from sandbox import labels

    run = f"reaper-{os.getpid()}"
    async with SandboxPool(SandboxConfig(backend="docker", min_sessions=1, max_sessions=2, run=run)) as pool:
        assert await asyncio.to_thread(reap, run) == []
        monkeypatch.setattr(labels, "owner_name", lambda: "/".join([*labels_owner_parts()[:3], "1", "dead"]))
        extra = await asyncio.gather(pool.acquire(episode_id="a"), pool.acquire(episode_id="b"))
        boxes = await asyncio.to_thread(list_boxes, run)
        assert sorted(bool(box.orphan) for box in boxes) == [False, True]
        reaped = await asyncio.to_thread(reap, run)
        assert [box.orphan for box in reaped] == ["its owner is dead"]
        statuses = {(await session.run("1")).status for session in extra}
        assert statuses == {"ok", "infra_error"}
        for session in extra:
            await session.release()
    assert await eventually(lambda: not list_boxes(run))


def labels_owner_parts() -> list[str]:
    from sandbox.owner import owner_name

    return owner_name().split("/")


async def test_a_container_killed_from_outside_is_an_infra_error_and_replaced():
    need("docker")
    run = f"outside-{os.getpid()}"
    async with SandboxPool(SandboxConfig(backend="docker", min_sessions=1, max_sessions=1, run=run)) as pool:
        async with await pool.acquire(episode_id="e") as session:
            running = asyncio.create_task(session.run("import time\ntime.sleep(60)", timeout_s=90))
            await asyncio.sleep(0.2)
            (box,) = await asyncio.to_thread(list_boxes, run)
            await asyncio.to_thread(subprocess.run, ["docker", "kill", box.id], check=True, capture_output=True)
            result = await running
            assert result.status == "infra_error" and result.state_lost
            assert (await session.run("1 + 1", timeout_s=ENOUGH_S)).value == "2"
        idle = pool.stats().created
        assert await eventually(lambda: pool.stats().idle == 1)
        (box,) = await asyncio.to_thread(list_boxes, run)
        await asyncio.to_thread(subprocess.run, ["docker", "kill", box.id], check=True, capture_output=True)
        assert await eventually(lambda: pool.stats().created == idle + 1 and pool.stats().idle == 1)


class Wire:
    """A relay in front of the engine's socket that can be cut: an engine that goes away and comes back."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def mend(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        os.unlink(self.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_unix_connection("/var/run/docker.sock")
        self._writers |= {writer, engine_writer}
        try:
            await asyncio.gather(self._copy(reader, engine_writer), self._copy(engine_reader, writer))
        finally:
            self._writers -= {writer, engine_writer}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


async def test_an_engine_that_goes_away_is_an_infra_error_and_the_pool_recovers(tmp_path, monkeypatch):
    need("docker")
    if os.environ.get("DOCKER_HOST"):
        pytest.skip("the engine is not at its usual socket")
    wire = Wire(str(tmp_path / "docker.sock"))
    await wire.mend()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{wire.path}")
    run = f"wire-{os.getpid()}"
    config = SandboxConfig(
        backend="docker", min_sessions=1, max_sessions=2, run=run, breaker_failures=2, breaker_cooldown_s=0.3
    )
    async with SandboxPool(config) as pool:
        session = await pool.acquire(episode_id="e")
        running = asyncio.create_task(session.run("import time\ntime.sleep(60)", timeout_s=90))
        await asyncio.sleep(0.2)
        await wire.cut()
        assert (await running).status == "infra_error"
        assert (await session.run("1")).status == "infra_error"
        await wire.mend()
        end = time.monotonic() + ENOUGH_S
        while (result := await session.run("1 + 1", timeout_s=ENOUGH_S)).status == "infra_error":
            assert time.monotonic() < end, result
            await asyncio.sleep(0.1)
        assert result.value == "2"
        await session.release()
    monkeypatch.delenv("DOCKER_HOST")
    assert await eventually(lambda: not list_boxes(run))


async def test_a_memory_hog_does_not_touch_its_neighbour():
    need("docker")
    config = SandboxConfig(backend="docker", min_sessions=2, max_sessions=2, memory_mib=64, run=f"hog-{os.getpid()}")
    async with SandboxPool(config) as pool:
        hog, neighbour = await asyncio.gather(pool.acquire(episode_id="hog"), pool.acquire(episode_id="neighbour"))
        await neighbour.run("x = 1", timeout_s=ENOUGH_S)
        result = await hog.run("hold = []\nwhile True: hold.append(bytearray(2**20))", timeout_s=ENOUGH_S)
        assert result.status in ("oom", "error") and (result.status == "oom" or "MemoryError" in result.stderr), result
        after = await neighbour.run("x + 1", timeout_s=ENOUGH_S)
        assert after.value == "2" and not after.state_lost
        await hog.release()
        await neighbour.release()


async def test_two_pools_on_one_engine_keep_apart():
    need("docker")
    first, second = f"one-{os.getpid()}", f"two-{os.getpid()}"
    async with SandboxPool(SandboxConfig(backend="docker", min_sessions=1, max_sessions=1, run=first)) as one:
        async with SandboxPool(SandboxConfig(backend="docker", min_sessions=1, max_sessions=1, run=second)):
            assert len(list_boxes(first)) == len(list_boxes(second)) == 1
            assert reap(first) == reap(second) == []
        assert await eventually(lambda: not list_boxes(second))
        async with await one.acquire(episode_id="e") as session:
            assert (await session.run("1", timeout_s=ENOUGH_S)).value == "1"


async def test_a_box_that_hears_nothing_ends_itself():
    need("docker")
    run = f"silent-{os.getpid()}"
    async with SandboxPool(SandboxConfig(backend="docker", min_sessions=1, max_sessions=1, run=run, ttl_s=1.0)) as pool:
        await asyncio.sleep(2.0)  # heartbeats keep it alive
        assert pool.stats().created == 1 and pool.stats().idle == 1
        for task in list(pool._tasks):  # the owner hangs: no heartbeat
            task.cancel()
        first = {box.id for box in await asyncio.to_thread(list_boxes, run)}
        assert await eventually(lambda: not first & {box.id for box in list_boxes(run)})
