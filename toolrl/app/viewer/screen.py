"""The live screen: what the policy does now and how it got there. A pure rendering of `Seen`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from toolrl.app.viewer.outcome_table import outcome_line
from toolrl.app.viewer.step_line import POLICY_TOKENS_PER_S, duration, number, queue_depths

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKS = 32
# What is drawn over the steps: label, metric, format, colour.
_CURVES = (
    ("reward", "reward/mean", ".3f", "green"),
    ("call rate", "tool/call_rate", ".2f", "cyan"),
    ("calls each", "tool/calls_per_trajectory", ".2f", "cyan"),
    ("format healthy", "format/healthy", ".2f", "magenta"),
    ("staleness", "staleness/mean", ".2f", "yellow"),
    ("entropy", "entropy/mean", ".3f", "blue"),
)


@dataclass
class Seen:
    """What the screen shows."""

    name: str
    steps: int
    started: float = field(default_factory=time.monotonic)
    stage: str = ""
    stage_since: float = field(default_factory=time.monotonic)
    step: int = 0
    left_s: float | None = None
    history: dict[str, list[float]] = field(default_factory=dict)
    latest: Mapping[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, step: int, metrics: Mapping[str, float], left_s: float) -> None:
        self.step, self.latest, self.left_s = step, metrics, left_s
        for _, name, _, _ in _CURVES:
            if name in metrics:
                self.history.setdefault(name, []).append(metrics[name])


def screen(seen: Seen) -> Panel:
    """The whole screen: about fifteen lines."""
    parts: list[RenderableType] = [_progress(seen)]
    if seen.latest:
        parts += [_curves(seen), _gauges(seen.latest)]
    parts += [Text(note, style="dim", overflow="ellipsis", no_wrap=True) for note in seen.notes[-3:]]
    if seen.stage:
        waited = duration(time.monotonic() - seen.stage_since)
        parts.append(Text(f"{seen.stage} … {waited}", style="bold", overflow="ellipsis", no_wrap=True))
    return Panel(Group(*parts), title=f"toolrl · {seen.name}", title_align="left", border_style="dim", width=100)


def _progress(seen: Seen) -> Table:
    row = Table.grid(padding=(0, 2))
    elapsed = duration(time.monotonic() - seen.started)
    left = f"about {duration(seen.left_s)} left" if seen.left_s is not None else ""
    bar = ProgressBar(total=max(seen.steps, 1), completed=seen.step, width=36)
    row.add_row(f"step {seen.step}/{seen.steps}", bar, f"{elapsed} elapsed", left)
    return row


def _curves(seen: Seen) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=14)
    table.add_column(justify="right", width=7)
    table.add_column(width=_SPARKS)
    table.add_column()
    for label, name, form, colour in _CURVES:
        values = seen.history.get(name)
        if values:
            first = f"from {format(values[0], form)}" if len(values) > 1 else ""
            now = Text(format(values[-1], form), style=f"bold {colour}")
            table.add_row(label, now, Text(sparkline(values), style=colour), Text(first, style="dim"))
    return table


def _gauges(metrics: Mapping[str, float]) -> Text:
    learning = (
        f"loss {number(metrics, 'loss/policy', '.4f')} · ratio max {number(metrics, 'ratio/max', '.3f')} · "
        f"clipped {number(metrics, 'ratio/clip_fraction', '.1%')} · gradient {number(metrics, 'grad/norm')}"
    )
    times = (
        f"rollout {number(metrics, 'time/rollout_s', '.1f')} s · learn {number(metrics, 'time/learn_s', '.1f')} s · "
        f"publish {number(metrics, 'time/publish_s', '.2f')} s · {number(metrics, POLICY_TOKENS_PER_S, '.0f')} tokens/s"
    )
    depths = queue_depths(metrics)
    lines = [learning, times, f"groups: {depths}" if depths else "", outcome_line(metrics)]
    return Text("\n".join(filter(None, lines)), overflow="ellipsis", no_wrap=True)


def sparkline(values: Sequence[float], width: int = _SPARKS) -> str:
    """The values as blocks, the last on the right; more of them than places are averaged."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    size = max(1.0, len(finite) / width)
    bins = [finite[int(i * size) : max(int(i * size) + 1, int((i + 1) * size))] for i in range(min(width, len(finite)))]
    means = [sum(each) / len(each) for each in bins]
    low, high = min(means), max(means)
    span = high - low
    return "".join(_BLOCKS[int((mean - low) / span * (len(_BLOCKS) - 1) + 0.5) if span > 0 else 0] for mean in means)
