"""Runs by name: finding one that exists, choosing a free name for a new one.

Nothing here creates a folder; `toolrl.app.run_folder` does.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from toolrl.config import RunConfig
from toolrl.errors import UserError
from toolrl.registry import nearest

CONFIG_FILE = "config.yaml"


def names(runs_dir: str | Path) -> list[str]:
    """Runs in a folder of runs, by name."""
    return sorted(path.parent.name for path in Path(runs_dir).glob(f"*/{CONFIG_FILE}"))


def find(run: str, runs_dir: str | Path = "runs") -> Path:
    """The folder of a run that is given by its name or its folder. Raises UserError naming the nearest run."""
    for path in (Path(run), Path(runs_dir) / run):
        if (path / CONFIG_FILE).is_file():
            return path
    known = names(runs_dir)
    if not known:
        raise UserError(f"no run {run!r}: {runs_dir}/ holds no runs; start one with `toolrl train quickstart-cpu`")
    raise UserError(f"no run {run!r} in {runs_dir}/{nearest(run, known)}")


def find_or_newest(name: str, runs_dir: str | Path = "runs") -> Path:
    """As `find`, but a name that was taken several times (`name`, `name-2`, …) means the last of them."""
    pattern = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
    numbered = {int(found.group(1) or 1): run for run in names(runs_dir) if (found := pattern.fullmatch(run))}
    return find(numbered[max(numbered)] if numbered else name, runs_dir)


def with_free_name(config: RunConfig) -> RunConfig:
    """The config under its own name, or the first of `name-2`, `name-3`, … that no folder has."""
    number, name = 1, config.name
    while (Path(config.runs_dir) / name).exists():
        number += 1
        name = f"{config.name}-{number}"
    return replace(config, name=name)
