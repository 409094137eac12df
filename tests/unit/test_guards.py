"""The rules of guards: each fires at the right step and only then, whatever the series and wherever the run is stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from toolrl.config import Named
from toolrl.guards import Guards, Journal, Rule
from toolrl.guards.journal import read_journal
from toolrl.guards.rule import CONDITIONS

METRIC = "tool/call_rate"


def rule(condition: str = "below", threshold: float = 0.5, **more: Any) -> Rule:
    options = {"name": "watched", "metric": METRIC, "action": Named("tell"), "cool_down_steps": 0, **more}
    return Rule(condition=condition, threshold=threshold, **options)  # type: ignore[arg-type]


def metrics(value: float | None) -> dict[str, float]:
    return {"other": 1.0} if value is None else {METRIC: value}


def firings(guards: Guards, values: Sequence[float | None], first: int = 1) -> list[int]:
    return [step for step, value in enumerate(values, first) if guards.observe(step, metrics(value))]


def by_hand(rule: Rule, values: Sequence[float | None]) -> list[int]:
    """The steps at which a rule is to fire, each decided from the whole history anew in float64."""
    fired: list[int] = []
    in_trouble, streak = False, 0
    for step in range(1, len(values) + 1):
        if values[step - 1] is None or not math.isfinite(values[step - 1]):  # type: ignore[arg-type]
            continue
        known = np.array([v for v in values[:step] if v is not None and math.isfinite(v)], dtype=np.float64)
        if len(known) < rule.window:
            continue
        levels = np.convolve(known, np.ones(rule.window), "valid") / rule.window
        k = rule.release if in_trouble and rule.release is not None else rule.threshold
        n = len(levels) - 1  # earlier levels
        mean = 0.0
        for index, level in enumerate(levels[:-1]):
            rate = max(1 / (index + 1), 0.1)
            mean = rate * level + (1 - rate) * mean
        beyond = {
            "below": levels[-1] < k,
            "above": levels[-1] > k,
            "drop_from_peak": levels[-1] < levels.max() - k,
            "rise_from_low": levels[-1] > levels.min() + k,
            "above_ema": n > 0 and levels[-1] > k * mean and levels[-1] > rule.floor,
        }[rule.condition]
        streak = streak + 1 if beyond else 0
        in_trouble = in_trouble and bool(beyond)
        is_cool = not fired or step - fired[-1] > rule.cool_down_steps
        if streak >= rule.hold and len(known) > rule.min_steps and is_cool:
            fired.append(step)
            in_trouble = True
    return fired


# Eighths are exact in binary: the reference's other order of adding cannot move a value across a limit.
VALUES = st.lists(
    st.one_of(st.integers(0, 16).map(lambda n: n / 8), st.sampled_from([None, math.nan, math.inf])), max_size=30
)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    condition = draw(st.sampled_from(CONDITIONS))
    threshold = draw(st.integers(1, 12)) / 8 + (1 if condition == "above_ema" else 0)
    step = draw(st.integers(0, 4)) / 8
    released = threshold + step if condition == "below" else max(threshold - step, 0.0)
    return rule(
        condition,
        threshold,
        floor=draw(st.integers(0, 8)) / 8 if condition == "above_ema" else 0.0,
        window=draw(st.sampled_from([1, 2, 4])),
        hold=draw(st.integers(1, 3)),
        min_steps=draw(st.integers(0, 5)),
        cool_down_steps=draw(st.integers(0, 5)),
        release=draw(st.sampled_from([None, released])),
    )


@settings(max_examples=300, deadline=None)
@given(rules(), VALUES)
def test_a_rule_fires_where_the_whole_history_says_so(watched: Rule, values: list[float | None]) -> None:
    assume(watched.condition != "above_ema" or not is_decided_by_rounding(watched, values))
    assert firings(Guards([watched]), values) == by_hand(watched, values)


def is_decided_by_rounding(watched: Rule, values: Sequence[float | None]) -> bool:
    """Whether some level is as good as equal to a multiple of the running mean."""
    guards = Guards([watched])
    for step, value in enumerate(values, 1):
        mean = guards.watched("watched").ema
        guards.observe(step, metrics(value))
        recent = guards.watched("watched").recent[-watched.window :]
        for factor in (watched.threshold, watched.release or 0.0):
            if mean is not None and recent and abs(sum(recent) / len(recent) - factor * mean) < 1e-9:
                return True
    return False


@settings(max_examples=100, deadline=None)
@given(rules(), VALUES, st.integers(0, 30))
def test_a_stop_between_two_steps_changes_nothing(watched: Rule, values: list[float | None], at: int) -> None:
    whole = Guards([watched])
    before = Guards([watched])
    expected = firings(whole, values)
    found = firings(before, values[:at])
    after = Guards([watched])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert found + firings(after, values[at:], first=len(values[:at]) + 1) == expected
    assert after.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("condition", "threshold", "values", "at"),
    [
        ("below", 0.2, [0.5, 0.2, 0.1], 3),
        ("above", 0.05, [0.05, 0.06], 2),
        ("drop_from_peak", 0.3, [0.2, 0.9, 0.7, 0.5], 4),
        ("rise_from_low", 1.0, [2.0, 0.5, 1.4, 1.6], 4),
        ("above_ema", 3.0, [1.0, 1.0, 2.9, 5.0], 4),
    ],
)
def test_each_condition_at_its_step(condition: str, threshold: float, values: list[float], at: int) -> None:
    guards = Guards([rule(condition, threshold)])
    decisions = [each for step, value in enumerate(values, 1) for each in guards.observe(step, metrics(value))]
    (only,) = decisions
    assert (only.step, only.rule, only.action, only.metric) == (at, "watched", "tell", METRIC)
    assert only.evidence["level"] == values[-1]
    assert only.evidence["last_values"] == values


def test_a_rise_below_the_floor_is_none() -> None:
    assert firings(Guards([rule("above_ema", 3.0, floor=1e-3)]), [2e-5, 2e-5, 9e-5, 9e-4, 2e-3]) == [5]


def test_a_missing_metric_is_counted_and_fires_nothing() -> None:
    guards = Guards([rule("below", 0.5)])
    assert firings(guards, [None, math.nan, math.inf, -math.inf]) == []
    assert guards.watched("watched").missing == 4
    assert guards.metrics() == {"guard/watched": 0.0, "guards/blind": 1.0}
    assert firings(guards, [0.1], first=5) == [5]
    assert guards.metrics() == {"guard/watched": 1.0, "guards/blind": 0.0}


def test_trouble_ends_at_the_release_and_not_before() -> None:
    guards = Guards([rule("above", 0.05, release=0.03)])
    holding = []
    for step, value in enumerate([0.06, 0.04, 0.06, 0.02, 0.04, 0.06], 1):
        guards.observe(step, metrics(value))
        holding.append(bool(guards.holding))
    assert holding == [True, True, True, False, False, True]


def test_a_cool_down_is_kept_to_the_step() -> None:
    assert firings(Guards([rule("below", 0.5, cool_down_steps=3)]), [0.1] * 10) == [1, 5, 9]


def test_only_rules_that_reject_are_asked_before_learning() -> None:
    rejects = rule("above", 0.2, name="rejects", action=Named("reject_batch"))
    tells = rule("above", 0.2, name="tells")
    guards = Guards([rejects, tells])
    assert [each.rule for each in guards.before_learning(1, metrics(0.5))] == ["rejects"]
    assert [each.rule for each in guards.before_learning(1, metrics(0.5))] == ["rejects"]  # the next batch of this step
    assert [each.rule for each in guards.before_learning(1, metrics(0.1))] == []  # which is trained
    assert [each.rule for each in guards.observe(1, metrics(0.1))] == []
    assert guards.metrics() == {"guard/rejects": 1.0, "guard/tells": 0.0, "guards/blind": 0.0}
    assert [each.rule for each in guards.observe(2, metrics(0.5))] == ["tells"]


def test_a_roll_back_forgets_the_collapse_but_not_that_it_was_dealt_with() -> None:
    guards = Guards([rule("drop_from_peak", 0.4, cool_down_steps=3)])
    firings(guards, [0.9, 0.9])
    checkpoint = json.loads(json.dumps(guards.state_dict()))
    assert firings(guards, [1.0, 0.3], first=3) == [4]
    guards.roll_back(checkpoint)
    watched = guards.watched("watched")
    assert (watched.peak, watched.fired, watched.quiet) == (0.9, 1, 3)
    assert firings(guards, [0.3] * 5, first=5) == [8]


def test_what_was_seen_and_what_came_of_it_stand_in_the_journal(tmp_path: Path) -> None:
    guards = Guards([rule("below", 0.5, follow_up_steps=2, cool_down_steps=9)], Journal(tmp_path))
    firings(guards, [0.9, 0.2, 0.4, 0.3, 0.7, 0.8])
    told = [(each["step"], each["kind"]) for each in read_journal(tmp_path)]
    assert told == [(2, "seen"), (4, "came_of_it"), (5, "ended")]
    seen, came, ended = read_journal(tmp_path)
    assert seen["evidence"] == {"level": 0.2, "limit": 0.5, "last_values": [0.9, 0.2]}
    assert (came["fired_at"], came["before"], came["after"], came["is_gone"]) == (2, 0.2, 0.3, False)
    assert (ended["rule"], ended["what"]) == ("watched", "trouble")


def test_a_resumed_run_forgets_what_it_will_write_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in (1, 2, 3):
        journal.write(step, "seen", rule="r", evidence={"level": math.nan})
    with journal.path.open("a") as file:
        file.write('{"step": 4, "ki')
    assert [each["step"] for each in read_journal(tmp_path)] == [1, 2, 3]
    Journal(tmp_path, resumed_at=2).write(3, "done", rule="r")
    assert [(each["step"], each["kind"]) for each in read_journal(tmp_path)] == [(1, "seen"), (2, "seen"), (3, "done")]
    assert read_journal(tmp_path)[0]["evidence"]["level"] is None


def test_a_resumed_run_may_have_a_longer_window_and_other_rules() -> None:
    before = Guards([rule("below", 0.5), rule("below", 0.1, name="gone")])
    firings(before, [1.0] * 20)
    after = Guards([rule("below", 0.95, window=10), rule("below", 0.95, name="new")])
    after.load_state_dict(before.state_dict())
    assert [[each.rule for each in after.observe(step, metrics(1.0))] for step in (21, 22, 23)] == [[], [], []]
    assert [after.watched(name).seen for name in ("watched", "new")] == [23, 3]


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="share a name"):
        Guards([rule(), rule()])
