"""The sandbox's own figures: round trip, acquire, reset, creation, load, deadlines, memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from dataclasses import dataclass

from sandbox.backend import Backend
from sandbox.config import SandboxConfig
from sandbox.measure.figures import timed
from sandbox.pool import SandboxPool

_ENOUGH_S = 30.0
# Memory that only this box uses and that cannot be had back: its processes, not the files of the image it has read.
_MEMORY = """
import os
def field(path, name):
    return next(int(line.split()[1]) for line in open(path) if line.split()[0] == name)
if os.path.exists('/sys/fs/cgroup/memory/memory.stat'):
    used = field('/sys/fs/cgroup/memory/memory.stat', 'total_rss') + field('/sys/fs/cgroup/memory/memory.stat', 'total_shmem' if 'total_shmem ' in open('/sys/fs/cgroup/memory/memory.stat').read() else 'total_rss_huge')
else:
    used = field('/sys/fs/cgroup/memory.stat', 'anon') + field('/sys/fs/cgroup/memory.stat', 'shmem') + field('/sys/fs/cgroup/memory.stat', 'kernel')
used / 2**20
"""  # noqa: E501  a cell


@dataclass(frozen=True)
class Load:
    """A pool of `boxes`, each with a cell at once: cells a second, and seconds of each with and without its wait for one
    of the machine's run slots."""

    boxes: int
    runs_per_s: float
    times_s: list[float]
    unqueued_s: list[float]


async def round_trips(config: SandboxConfig, code: str, rounds: int) -> list[float]:
    """Seconds of a cell on one box."""
    config = dataclasses.replace(config, min_sessions=1, max_sessions=1)
    async with SandboxPool(config) as pool, await pool.acquire(episode_id="measure") as session:

        async def cell() -> None:
            result = await session.run(code, timeout_s=_ENOUGH_S)
            if result.status != "ok":
                raise RuntimeError(f"a cell ended with {result.status}: {result.note or result.stderr}")

        return await timed(cell, rounds, warm_up=50)


async def episodes(config: SandboxConfig, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of acquiring a warm box, and of the reset between two episodes."""
    config = dataclasses.replace(config, min_sessions=1, max_sessions=1)
    acquires, resets = [], []
    async with SandboxPool(config) as pool:
        for number in range(rounds):
            await asyncio.sleep(0.05)  # an episode thinks longer than a reset takes
            started = time.perf_counter()
            session = await pool.acquire(episode_id=f"measure-{number}")
            acquires.append(time.perf_counter() - started)
            await session.run("x = 1", timeout_s=_ENOUGH_S)
            started = time.perf_counter()
            await session.release()
            await (await pool.acquire(episode_id="waits for the reset")).release()
            resets.append(time.perf_counter() - started)
    return acquires, resets


async def creations(backend: Backend, rounds: int) -> list[float]:
    """Seconds until a new box takes cells."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        box = await backend.create()
        times.append(time.perf_counter() - started)
        await box.destroy()
    return times


async def load(config: SandboxConfig, boxes: int, seconds: float) -> Load:
    """Trivial cells on `boxes` boxes at once for some seconds."""
    config = dataclasses.replace(config, min_sessions=boxes, max_sessions=boxes)
    times: list[float] = []
    unqueued: list[float] = []
    async with SandboxPool(config) as pool, contextlib.AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(await pool.acquire(episode_id=f"load-{number}")) for number in range(boxes)
        ]
        await asyncio.gather(*(session.run("1 + 1", timeout_s=_ENOUGH_S) for session in sessions))
        end = time.perf_counter() + seconds

        async def play(session) -> None:  # type: ignore[no-untyped-def]
            while (started := time.perf_counter()) < end:
                result = await session.run("1 + 1", timeout_s=_ENOUGH_S)
                times.append(time.perf_counter() - started)
                unqueued.append(times[-1] - result.queue_s)

        started = time.perf_counter()
        await asyncio.gather(*(play(session) for session in sessions))
        return Load(boxes, len(times) / (time.perf_counter() - started), times, unqueued)


async def overshoots(config: SandboxConfig, rounds: int, timeout_s: float = 0.2) -> list[float]:
    """Seconds by which an endless loop outlives its deadline, a fresh interpreter included."""
    config = dataclasses.replace(config, min_sessions=1, max_sessions=1)
    async with SandboxPool(config) as pool, await pool.acquire(episode_id="measure") as session:
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            await session.run("while True: pass", timeout_s=timeout_s)
            times.append(time.perf_counter() - started - timeout_s)
        return times


async def memory_mib(config: SandboxConfig) -> float:
    """Memory of a box that has run nothing but the look at it."""
    config = dataclasses.replace(config, min_sessions=1, max_sessions=1)
    async with SandboxPool(config) as pool, await pool.acquire(episode_id="measure") as session:
        result = await session.run(_MEMORY, timeout_s=_ENOUGH_S)
        if result.value is None:
            raise RuntimeError(f"the box could not tell its memory: {result.stderr}")
        return float(result.value)
