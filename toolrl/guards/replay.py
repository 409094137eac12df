"""Rules over the metrics of a run that is stored: what would have fired, and which rules came near.

What a rule would do is not played: after its first firing the metrics are those of a run in which nothing was done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from toolrl.guards.rule import Decision, Reading, Rule, Watched, decision, read

NEAR = 0.75  # of the way to the limit


@dataclass(frozen=True)
class Closest:
    """The step at which a rule was closest to firing."""

    rule: Rule
    seen: int  # steps at which the metric had a value
    step: int | None = None  # None: no level ever
    level: float = math.nan
    limit: float = math.nan
    share: float = 0.0  # of the way to the limit; 1 and more: beyond it
    held: int = 0  # the most levels in a row beyond the limit

    @property
    def is_near(self) -> bool:
        return self.share >= NEAR


def replay(rules: Sequence[Rule], rows: Iterable[Mapping[str, float]]) -> tuple[list[Decision], list[Closest]]:
    """(what fires, in order; one `Closest` a rule, in the rules' order) over rows of metrics with their `step`."""
    watched = {rule.name: Watched() for rule in rules}
    closest = {rule.name: Closest(rule, 0) for rule in rules}
    fired = []
    for row in rows:
        for rule in rules:
            memory, step = watched[rule.name], int(row["step"])
            reading = read(rule, memory, step, row.get(rule.metric))
            if reading.fires:
                fired.append(decision(rule, memory, step, reading))
            closest[rule.name] = _closer(closest[rule.name], memory, step, reading)
    return fired, list(closest.values())


def way_to_limit(rule: Rule, reading: Reading) -> float:
    """How much of the way from where the metric is at rest to the limit its level has gone; 1 and more: beyond it.

    A level at rest is the peak, the low or the running mean; for a fixed limit it is 0, or far from it on the right side.
    """
    level, limit, reference = reading.level, reading.limit, reading.reference
    if level is None or limit is None:
        return 0.0
    if rule.condition in ("drop_from_peak", "rise_from_low"):
        assert reference is not None
        return 0.0 if level == reference else (level - reference) / (limit - reference)
    if rule.is_beyond(level, limit):
        return 1.0
    nearer, farther = (level, limit) if rule.is_upper == (limit > 0) else (limit, level)
    return max(0.0, nearer / farther) if farther else 0.0


def _closer(known: Closest, watched: Watched, step: int, reading: Reading) -> Closest:
    rule, held = known.rule, max(known.held, watched.streak)
    share = way_to_limit(rule, reading)
    if reading.level is None or reading.limit is None or watched.seen <= rule.min_steps or share < known.share:
        return Closest(rule, watched.seen, known.step, known.level, known.limit, known.share, held)
    return Closest(rule, watched.seen, step, reading.level, reading.limit, share, held)
