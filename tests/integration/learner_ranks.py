"""Real learner ranks over gloo, each in a fresh process that does all its cases in one go: importing costs more than they do."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_ranks(work: Callable[..., None], world: int, folder: Path, *arguments: Any) -> list[Any]:
    """Runs `work(rank, world, port, folder, *arguments)` in `world` fresh processes; `finish` waits for them."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_guarded, args=(work, rank, world, port, folder, *arguments)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    return processes


def finish(processes: list[Any], folder: Path) -> None:
    for process in processes:
        process.join(timeout=200)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("error_*")))
    assert not errors, errors
    assert not alive and all(process.exitcode == 0 for process in processes)


def _guarded(work: Callable[..., None], rank: int, world: int, port: int, folder: Path, *arguments: Any) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    try:
        work(rank, world, port, folder, *arguments)
    except BaseException:
        (folder / f"error_{world}_{rank}").write_text(traceback.format_exc())
        raise
