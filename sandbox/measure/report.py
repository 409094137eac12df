"""All figures in one run, so that their ratios mean something on a machine whose load changes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator

from sandbox.available import make_backend
from sandbox.config import SandboxConfig
from sandbox.measure import own, peers
from sandbox.measure.figures import Figure, median_ms, ratio_figure, times_figure

CELL = "1 + 1"


async def measure(
    config: SandboxConfig, *, boxes: tuple[int, ...] = (1, 8, 16, 64), seconds: float = 2.0, jupyter: str | None = None
) -> AsyncIterator[Figure]:
    """The figures, one after the other; about a minute. `jupyter`: a Python that has jupyter_client and ipykernel.

    Raises SandboxUnavailable.
    """
    config = dataclasses.replace(config, preimport=("numpy",))
    backend, _ = await asyncio.to_thread(make_backend, config)
    docker = backend.name == "docker"
    try:
        yield Figure("load average before", os.getloadavg()[0], f"on {os.cpu_count()} cores")
        creations = await own.creations(backend, 12)
        yield times_figure("cold create, numpy imported", creations, p50_ms=200)
    finally:
        await backend.close()
    if docker:
        starts = await peers.container_starts(config, 12)
        yield times_figure("`cat` started in such a container (limit)", starts)
        yield ratio_figure("cold create / started `cat`", median_ms(creations) / median_ms(starts))
    cells = await own.round_trips(config, CELL, 1000)
    yield times_figure(f"cell, {backend.name} backend", cells, p50_ms=0.3, p99_ms=2)
    async for figure in _against_peers(config, docker, cells, jupyter):
        yield figure
    acquires, resets = await own.episodes(config, 60)
    yield times_figure("acquire a warm box", acquires, p50_ms=1)
    yield times_figure("release, reset, acquire again", resets, p50_ms=6)
    yield times_figure("timeout overshoot", await own.overshoots(config, 10), p99_ms=250)
    async for figure in _under_load(config, boxes, seconds):
        yield figure
    if docker:
        used = await own.memory_mib(config)
        yield Figure("memory of an idle box, numpy imported", used, "MiB", None, "≤ 25", "yes" if used <= 25 else "no")


async def _against_peers(
    config: SandboxConfig, docker: bool, cells: list[float], jupyter: str | None
) -> AsyncIterator[Figure]:
    ours = median_ms(cells)
    if docker:
        bare, framed = await peers.container_echo(config, 1000)
        yield times_figure("echo by `cat` in such a container, blocking socket (limit)", bare)
        yield times_figure("echo by `cat` in such a container, our frames", framed)
        yield ratio_figure("cell / bare echo", ours / median_ms(bare))
        executed = await peers.docker_exec(config, CELL, 12)
        yield times_figure("`docker exec` a cell (peer)", executed)
        yield ratio_figure("docker exec / cell", median_ms(executed) / ours, at_least=100)
    try:
        kernel = await peers.jupyter_kernel(CELL, 300, jupyter)
    except RuntimeError as error:
        yield Figure(f"Jupyter kernel: not measured, {error}", 0.0, "")
    else:
        yield times_figure("cell in a Jupyter kernel, a plain process (peer)", kernel)
        yield ratio_figure("Jupyter kernel / cell", median_ms(kernel) / ours, at_least=5)
    started = await peers.new_process(CELL, 20)
    yield times_figure("new Python process a cell (peer)", started)
    yield ratio_figure("new process / cell", median_ms(started) / ours)


async def _under_load(config: SandboxConfig, boxes: tuple[int, ...], seconds: float) -> AsyncIterator[Figure]:
    for count in boxes:
        loaded = await own.load(config, count, seconds)
        per_core = loaded.runs_per_s / (os.cpu_count() or 1)
        wanted = count == 16
        met = ("yes" if per_core >= 2500 else "no") if wanted else ""
        yield Figure(f"{count} boxes: cells a second and core", per_core, "/s", None, "≥ 2500" if wanted else "", met)
        yield times_figure(f"{count} boxes: cell once it has a slot", loaded.unqueued_s, p99_ms=2 if count <= 16 else 0)
        yield times_figure(f"{count} boxes: cell with its wait", loaded.times_s, p99_ms=90 if count == 64 else 0)
