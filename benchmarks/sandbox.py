"""Round trip of a trivial cell, and acquiring a warm box, against a bare pipe to another process and a new Python process."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from sandbox import SandboxConfig, SandboxPool

ROUNDS = 400
EPISODES = 60


def run() -> dict[str, Any]:
    """`rows`: p50 and p99 in milliseconds; `times the pipe` is the ratio to the limit, a bare echo over a pipe."""
    pipe, process = _pipe(), _new_process()
    backend, cells, acquires = asyncio.run(_sandbox())
    return {
        "backend": backend,
        "rows": [
            _row("echo over a pipe (limit)", pipe, pipe),
            _row(f"cell, {backend} backend", cells, pipe),
            _row(f"acquire a warm box, {backend} backend", acquires, pipe),
            _row("new Python process a cell (peer)", process, pipe),
        ],
    }


def _row(what: str, times_s: list[float], limit_s: list[float]) -> dict[str, Any]:
    p50, p99 = statistics.median(times_s), statistics.quantiles(times_s, n=100)[98]
    return {
        "what": what,
        "p50 ms": p50 * 1e3,
        "p99 ms": p99 * 1e3,
        "times the pipe": p50 / statistics.median(limit_s),
    }


def _timed(action: Callable[[], object], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return times


def _pipe() -> list[float]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as cat:
        assert cat.stdin is not None and cat.stdout is not None
        reader, writer = cat.stdout, cat.stdin

        def echo() -> None:
            writer.write(b"x" * 200)
            reader.read(200)

        _timed(echo, 20)
        times = _timed(echo, ROUNDS)
        writer.close()
    return times


def _new_process() -> list[float]:
    return _timed(lambda: subprocess.run([sys.executable, "-I", "-c", "1 + 1"], check=True), 20)


async def _sandbox() -> tuple[str, list[float], list[float]]:
    """(backend, seconds a cell, seconds an acquire)."""
    async with SandboxPool(SandboxConfig(min_sessions=4, max_sessions=4, run="bench")) as pool:
        session = await pool.acquire(episode_id="bench")
        cells = []
        for number in range(ROUNDS + 20):
            started = time.perf_counter()
            result = await session.run("1 + 1", timeout_s=10)
            cells.append(time.perf_counter() - started)
            if result.status != "ok":
                raise RuntimeError(f"cell {number} ended with {result.status}: {result.note or result.stderr}")
        await session.release()
        acquires = []
        for number in range(EPISODES):
            started = time.perf_counter()
            session = await pool.acquire(episode_id=f"bench-{number}")
            acquires.append(time.perf_counter() - started)
            await session.run("x = 1", timeout_s=10)
            await session.release()
            await asyncio.sleep(0.02)  # an episode thinks longer than a reset takes
        return pool.stats().backend, cells[20:], acquires
