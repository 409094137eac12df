"""Monitors over steps, as a table for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

from rich.table import Table

from toolrl.app.monitor import MonitoredStep


def names_in(steps: Sequence[MonitoredStep], patterns: Sequence[str]) -> list[str]:
    """The metrics that fit one of the patterns, in the patterns' order."""
    every = sorted({name for step in steps for name in step.values})
    return list(dict.fromkeys(name for pattern in patterns for name in every if fnmatchcase(name, pattern)))


def spread(steps: Sequence[MonitoredStep], count: int) -> list[MonitoredStep]:
    """At most `count` of them, evenly from the first to the last."""
    if len(steps) <= count:
        return list(steps)
    if count == 1:
        return [steps[-1]]
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def monitor_table(steps: Sequence[MonitoredStep], names: Sequence[str], title: str) -> Table:
    """A row a metric, a column a step; above them how many of the step's trajectories were read again."""
    table = Table("monitor", "from", *(f"step {step.step}" for step in steps), title=title, title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    table.add_row("trajectories read again", "", *(f"{step.read} of {step.trained}" for step in steps))
    table.add_section()
    for name in names:
        origins = list(dict.fromkeys(step.origins[name] for step in steps if name in step.origins))
        table.add_row(name, ", ".join(sorted(origins)), *(_number(step.values.get(name)) for step in steps))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    small = value != 0 and abs(value) < 1e-3
    return f"{value:.1e}" if small else f"{value:.4g}"
