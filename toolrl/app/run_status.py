"""How a run stands, from its folder and, where it was launched, from its scheduler."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolrl import presets
from toolrl.app import runs
from toolrl.app.control import FILE as CONTROL
from toolrl.app.launch import submission
from toolrl.app.launch.submission import Launch
from toolrl.app.run_folder import RunFolder
from toolrl.errors import UserError
from toolrl.monitors.metrics_log import read_metrics
from toolrl.registry import nearest


@dataclass(frozen=True)
class Found:
    """A run by name: its own folder, once it has one, and how it was launched, if it was."""

    name: str
    folder: Path | None
    launch: Launch | None


def find(run: str, runs_dir: str | Path) -> Found:
    """Raises UserError for a name that neither a run nor a launch has."""
    try:
        folder: Path | None = runs.find(run, runs_dir).resolve()
    except UserError:
        folder = None
    name = folder.name if folder is not None else run
    place = folder.parent if folder is not None else Path(runs_dir)
    launch = submission.launched(name, place)
    if folder is None and launch is None:
        launches = [path.parent.name for path in place.glob(f"{submission.FOLDER}/*/{submission.RECORD}")]
        raise UserError(f"no run {run!r} in {runs_dir}/{nearest(run, [*runs.names(runs_dir), *launches])}")
    return Found(name, folder, launch)


def status_lines(found: Found) -> Iterator[str]:
    """What a person wants to know, a line each."""
    if found.launch is not None:
        state = submission.run(found.launch.command(found.launch.state), Path(found.launch.folder)).strip()
        yield f"{found.launch.target}: {state or 'its scheduler knows it no more'}"
    if found.folder is None:
        yield "not begun: its nodes are still to come"
        return
    folder = RunFolder(found.folder)
    config = presets.load(str(found.folder / runs.CONFIG_FILE))
    rows = read_metrics(found.folder)
    step = int(rows[-1]["step"]) if rows else 0
    alive = is_held(found.folder)
    yield f"{_stands(step >= config.loop.steps, alive, found.folder)} at step {step} of {config.loop.steps}"
    if rows:
        latest = rows[-1]
        ago = time.time() - folder.metrics.stat().st_mtime
        shown = ", ".join(f"{name} {latest[name]:.3f}" for name in _SHOWN if name in latest)
        yield f"step {step} ended {_span(ago)} ago: {shown}"
    checkpoint = folder.latest_checkpoint()
    yield f"last checkpoint: step {checkpoint.step}" if checkpoint else "no checkpoint yet"
    if not alive and step < config.loop.steps:
        yield f"`{resuming(found)}` goes on"


def resuming(found: Found) -> str:
    """The command that takes a run up again, where it was begun."""
    if found.launch is None:
        return f"toolrl train {found.name} --resume"
    place = Path(found.launch.folder).parents[1]
    return f"toolrl launch {found.name} --target {found.launch.target} --resume --runs-dir {place}"


_SHOWN = ("reward/mean", "solve_rate", "tool/call_rate", "format/healthy", "staleness/max")


def is_held(folder: Path) -> bool:
    """Whether a process of this machine, or of one that shares its file system, trains the run now."""
    lock = folder / "lock"
    if not lock.is_file():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _stands(ended: bool, alive: bool, folder: Path) -> str:
    if alive:
        control = folder / CONTROL
        where = f" (process {json.loads(control.read_text())['pid']})" if control.is_file() else ""
        return f"running{where}"
    return "finished" if ended else "not running"


def _span(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
