"""One guard rule and what it has seen: when a metric shows trouble, as arithmetic on its past values.

A metric's *level* is the mean of its last `window` finite values. The level is compared with a *limit*:

    condition        limit                                    trouble when
    below            threshold                                level < limit
    above            threshold                                level > limit
    drop_from_peak   highest level so far − threshold         level < limit
    rise_from_low    lowest level so far + threshold          level > limit
    above_ema        max(threshold × EMA, floor)              level > limit

The EMA is that of the earlier levels, so that a spike is not compared with itself. Invariants:
- A metric that is missing or not finite changes nothing but its count: it neither fires a rule nor breaks `hold`.
- While trouble lasts, `release` stands in for `threshold` (hysteresis): a level that trembles around one number is one
  trouble and not many.
- The same values give the same firings, with or without a stop in between: all state is in `Watched`, which is JSON.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from toolrl.config import Named

Condition = Literal["below", "above", "drop_from_peak", "rise_from_low", "above_ema"]
CONDITIONS = get_args(Condition)
EMA_RATE = 0.1  # weight of the newest level; the first ten levels weigh the same, as in a plain mean
KEPT_VALUES = 8  # shown as evidence, however short the window is


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When to act on a metric, and how. The settings of `toolrl.config.GuardRuleConfig`, checked."""

    name: str
    metric: str
    condition: Condition
    threshold: float
    action: Named
    floor: float = 0.0
    window: int = 1
    hold: int = 1
    min_steps: int = 0
    cool_down_steps: int = 10
    release: float | None = None
    follow_up_steps: int = 5

    @property
    def is_upper(self) -> bool:
        """Whether trouble is above the limit rather than below it."""
        return self.condition in ("above", "rise_from_low", "above_ema")

    def is_beyond(self, level: float, limit: float) -> bool:
        return level > limit if self.is_upper else level < limit


@dataclass(frozen=True)
class Decision:
    """A rule fired: what is to be done, and on which evidence."""

    step: int
    rule: str
    action: str
    options: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, float | list[float]] = field(default_factory=dict)  # see `decision`
    metric: str = ""
    condition: str = ""


@dataclass
class FollowUp:
    """A firing whose consequences are still to be told."""

    step: int  # at which the rule fired
    level: float
    limit: float
    due: int  # the step at which to look again


@dataclass
class Watched:
    """Everything a rule remembers of its metric."""

    recent: list[float] = field(default_factory=list)  # finite values, oldest first
    seen: int = 0  # finite values
    missing: int = 0  # steps without one
    peak: float | None = None
    low: float | None = None
    ema: float | None = None
    levels: int = 0
    streak: int = 0  # levels beyond the limit, one after the other
    in_trouble: bool = False  # fired, and not back on the right side since
    quiet: int = 0  # how often it will still be asked and not fire
    fired: int = 0
    follow_ups: list[FollowUp] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, state: dict[str, Any]) -> Watched:
        return cls(**{**state, "follow_ups": [FollowUp(**each) for each in state["follow_ups"]]})


@dataclass(frozen=True)
class Reading:
    """What one step's value means to a rule. `level` and `limit` are None before the window is full."""

    has_value: bool = True
    level: float | None = None
    limit: float | None = None
    reference: float | None = None  # the peak, low or EMA that the limit was made from
    fires: bool = False
    ends: bool = False  # the trouble of an earlier firing is over


def read(rule: Rule, watched: Watched, step: int, value: float | None) -> Reading:
    """Takes in a step's value (None: the metric is missing) and says what it means. Changes `watched`."""
    is_quiet, watched.quiet = watched.quiet > 0, max(0, watched.quiet - 1)
    if value is None or not math.isfinite(value):
        watched.missing += 1
        return Reading(has_value=False)
    watched.seen += 1
    watched.recent = [*watched.recent, float(value)][-max(rule.window, KEPT_VALUES) :]
    if len(watched.recent) < rule.window:  # `seen` may say more: a resumed run can have a longer window
        return Reading()
    level = sum(watched.recent[-rule.window :]) / rule.window
    watched.peak = level if watched.peak is None else max(watched.peak, level)
    watched.low = level if watched.low is None else min(watched.low, level)
    reference = reference_of(rule, watched)
    limit = limit_of(rule, watched, reference)
    _add_to_ema(watched, level)
    is_beyond = limit is not None and rule.is_beyond(level, limit)
    watched.streak = watched.streak + 1 if is_beyond else 0
    ends = watched.in_trouble and not is_beyond
    watched.in_trouble = watched.in_trouble and is_beyond
    fires = watched.streak >= rule.hold and watched.seen > rule.min_steps and not is_quiet
    if fires and limit is not None:
        watched.in_trouble = True
        watched.quiet = rule.cool_down_steps
        watched.fired += 1
        watched.follow_ups.append(FollowUp(step, level, limit, step + rule.follow_up_steps))
    return Reading(True, level, limit, reference, fires, ends)


def reference_of(rule: Rule, watched: Watched) -> float | None:
    """The peak, the low or the EMA; None for a fixed limit, and for an EMA before the first level."""
    return {"drop_from_peak": watched.peak, "rise_from_low": watched.low, "above_ema": watched.ema}.get(rule.condition)


def limit_of(rule: Rule, watched: Watched, reference: float | None) -> float | None:
    """What the newest level is compared with; None where that is not known yet."""
    threshold = rule.release if watched.in_trouble and rule.release is not None else rule.threshold
    if rule.condition in ("below", "above"):
        return threshold
    if reference is None:
        return None
    match rule.condition:
        case "drop_from_peak":
            return reference - threshold
        case "rise_from_low":
            return reference + threshold
        case _:
            return max(threshold * reference, rule.floor)


def decision(rule: Rule, watched: Watched, step: int, reading: Reading) -> Decision:
    """The firing `reading`, with its evidence: level and limit, the last values, what the limit was made from."""
    assert reading.level is not None and reading.limit is not None
    evidence: dict[str, float | list[float]] = {
        "level": reading.level,
        "limit": reading.limit,
        "last_values": list(watched.recent[-KEPT_VALUES:]),
    }
    if reading.reference is not None:
        evidence[{"drop_from_peak": "peak", "rise_from_low": "low"}.get(rule.condition, "ema")] = reading.reference
    options = dict(rule.action.options)
    return Decision(step, rule.name, rule.action.name, options, evidence, rule.metric, rule.condition)


def _add_to_ema(watched: Watched, level: float) -> None:
    watched.levels += 1
    rate = max(1 / watched.levels, EMA_RATE)
    watched.ema = level if watched.ema is None else (1 - rate) * watched.ema + rate * level
