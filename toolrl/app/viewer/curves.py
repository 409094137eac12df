"""The curves of a run as one PNG, drawn from its metrics.jsonl and evaluations.jsonl."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from toolrl.monitors.metrics_log import read_metrics

FILE = "curves.png"
EVALUATIONS = "evaluations.jsonl"
# Panel title, its metrics, its vertical range (None: the data's own).
_PANELS: tuple[tuple[str, tuple[str, ...], tuple[float, float] | None], ...] = (
    ("reward", ("reward/mean",), None),
    ("share of trajectories with a call", ("tool/call_rate",), (0, 1.03)),
    ("calls per trajectory", ("tool/calls_per_trajectory",), None),
    ("share of healthy turns", ("format/healthy",), (0, 1.03)),
    ("solve rate with and without a call", ("solve_rate/with_calls", "solve_rate/without_calls"), (0, 1.03)),
    ("staleness, versions", ("staleness/mean",), None),
    ("largest ratio", ("ratio/max",), None),
    ("entropy", ("entropy/mean",), None),
    ("seconds a step", ("time/rollout_s", "time/learn_s", "time/publish_s"), None),
)


def plot_curves(run_dir: str | Path) -> Path | None:
    """Writes `curves.png` into the run's folder and returns its path; None before the first step."""
    rows = read_metrics(run_dir)
    if not rows:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: no global state, no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9))
    FigureCanvasAgg(figure)
    panels = [panel for panel in _PANELS if any(name in row for row in rows for name in panel[1])]
    columns = 3
    grid = figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, names, limits) in zip(grid.flat, panels, strict=False):
        _panel(axes, rows, title, names, limits)
    if panels and panels[0][0] == "reward":
        _spread_and_evaluations(grid.flat[0], rows, read_evaluations(run_dir))
    figure.suptitle(Path(run_dir).resolve().name, x=0.04, ha="left")
    figure.subplots_adjust(left=0.04, right=0.985, bottom=0.06, top=0.92, wspace=0.16, hspace=0.38)
    target = Path(run_dir) / FILE
    figure.savefig(target, dpi=110)
    return target


def read_evaluations(run_dir: str | Path) -> list[dict[str, Any]]:
    """The tables of the run's evaluations on held-out tasks, each with its `step`."""
    path = Path(run_dir) / EVALUATIONS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _panel(
    axes: Any, rows: list[dict[str, float]], title: str, names: tuple[str, ...], limits: tuple[float, float] | None
) -> None:
    for name in names:
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            label = name.rpartition("/")[2].removesuffix("_s").replace("_", " ")
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1.6)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("step", fontsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    if limits is not None:
        axes.set_ylim(*limits)
    if len(names) > 1:
        axes.legend(fontsize=8, frameon=False)


def _spread_and_evaluations(axes: Any, rows: list[dict[str, float]], evaluations: list[dict[str, Any]]) -> None:
    """The rewards' spread around their mean, and the accuracy on held-out tasks."""
    steps = [row["step"] for row in rows]
    mean = [row.get("reward/mean", math.nan) for row in rows]
    spread = [row.get("reward/std", 0.0) for row in rows]
    low = [m - s for m, s in zip(mean, spread, strict=True)]
    high = [m + s for m, s in zip(mean, spread, strict=True)]
    axes.fill_between(steps, low, high, alpha=0.15)
    points = [(each["step"], each["all"]["accuracy"]) for each in evaluations if "accuracy" in each.get("all", {})]
    if points:
        axes.plot(*zip(*points, strict=True), "o", color="black", markersize=4, label="accuracy, held-out")
        axes.legend(fontsize=8, frameon=False)
