"""Step scores against references written another way, in float64; the identities that the rewards rest on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolrl.rewards.step_scores import Aggregate, Step, aggregate, credit, gains, running, tree_score, values_along

HOW: list[Aggregate] = ["last", "mean", "min", "product"]
scores = st.floats(0, 1, width=32)
maybe = st.lists(st.none() | scores, max_size=12)
trees = st.recursive(
    st.builds(Step, scores),
    lambda inner: st.builds(
        lambda score, tried: Step(score, tuple(tried)), st.none() | scores, st.lists(inner, min_size=1, max_size=4)
    ),
    max_leaves=20,
)


def reference(values: list[float | None], how: Aggregate) -> float:
    known = np.asarray([value for value in values if value is not None], dtype=np.float64)
    if not len(known):
        return 0.0
    return float({"last": lambda: known[-1], "mean": known.mean, "min": known.min, "product": known.prod}[how]())


@pytest.mark.parametrize(
    ("how", "along"),
    [
        ("last", [0.5, 0.75, 0.25, 1.0]),
        ("mean", [0.5, 0.625, 0.5, 0.625]),
        ("min", [0.5, 0.5, 0.25, 0.25]),
        ("product", [0.5, 0.375, 0.09375, 0.09375]),
    ],
)
def test_worked_numbers(how: Aggregate, along: list[float]) -> None:
    steps = [0.5, 0.75, 0.25, 1.0]
    assert running(steps, how) == along
    assert gains(steps, how, 0.25) == [0.25, *np.diff(along)]
    assert gains(steps, how, None) == [0.0, *np.diff(along)]
    assert credit(steps, how, "trajectory", 0.25) == along[-1]
    assert credit(steps, how, "turn", 0.25) == gains(steps, how, 0.25)


@settings(max_examples=40)
@given(maybe, st.sampled_from(HOW), st.none() | scores)
def test_credit_of_the_turns_adds_up_to_what_the_aggregate_gained(
    steps: list[float | None], how: Aggregate, start: float | None
) -> None:
    known = [step for step in steps if step is not None]
    assert aggregate(steps, how) == pytest.approx(reference(steps, how), abs=1e-12)
    gained = gains(steps, how, start)
    assert len(gained) == len(steps)
    before = (known[0] if start is None else start) if known else 0.0
    assert math.fsum(gained) == pytest.approx(reference(steps, how) - before if known else 0.0, abs=1e-12)
    for step, gain in zip(steps, gained, strict=True):
        assert step is not None or gain == 0.0, "what is not known earns nothing"


@settings(max_examples=40)
@given(maybe, st.sampled_from(HOW), st.integers(1, 5))
def test_further_turns_that_change_nothing_earn_nothing(steps: list[float | None], how: Aggregate, more: int) -> None:
    assert gains([*steps, *[None] * more], how, 0.5) == [*gains(steps, how, 0.5), *[0.0] * more]
    repeated = [0.5, *[0.5 if how != "product" else 1.0] * more]
    assert gains(repeated, how, 0.0)[1:] == [0.0] * more


def paths(
    step: Step, weight: float = 1.0, before: tuple[float | None, ...] = ()
) -> list[tuple[float, list[float | None]]]:
    """(weight, scores) of every path to an end."""
    if not step.tried:
        return [(weight, [*before, step.score])]
    share = weight / len(step.tried)
    return [each for after in step.tried for each in paths(after, share, (*before, step.score))]


@settings(max_examples=40)
@given(trees, st.sampled_from(HOW))
def test_a_tree_is_the_weighted_mean_of_its_paths(tree: Step, how: Aggregate) -> None:
    expected = sum(weight * reference(path, how) for weight, path in paths(tree))
    assert tree_score(tree, how) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=40)
@given(st.lists(scores, min_size=1, max_size=8), st.sampled_from(HOW))
def test_a_tree_without_branches_is_a_trajectory(steps: list[float], how: Aggregate) -> None:
    tree = Step(steps[-1])
    for score in reversed(steps[:-1]):
        tree = Step(score, (tree,))
    assert tree_score(tree, how) == pytest.approx(reference(steps, how), abs=1e-9)


@settings(max_examples=40)
@given(st.lists(st.lists(scores, max_size=5), max_size=6), st.none() | scores)
def test_a_step_is_worth_the_mean_of_its_continuations(branches: list[list[float]], end: float | None) -> None:
    values = values_along(branches, end)
    assert values[-1] == end and len(values) == len(branches) + 1
    for tried, value in zip(branches, values, strict=False):
        assert value == (pytest.approx(float(np.mean(tried)), abs=1e-9) if tried else None)
