"""Advantages over plain rewards and over recorded groups."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolrl.algorithms import advantages, embedders, group_advantages
from toolrl.registry import UnknownName
from toolrl.reward_records import has_spread
from toolrl.trajectory import Outcome, Trajectory, Turn

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=8)


def policy_turn(**rewards: float) -> Turn:
    return Turn("policy", [1, 2], [-0.1, -0.2], [0, 0], rewards=rewards)


def trajectory(index: int, *turns: Turn, ended: Outcome = Outcome.ANSWERED, **rewards: float) -> Trajectory:
    return Trajectory(f"t{index}", "g", "task", index, [1], list(turns), outcome=ended, rewards=rewards)


@given(rewards=REWARDS)
def test_grpo_equals_its_definition(rewards):
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    for found, reward in zip(advantages.grpo(rewards), rewards, strict=True):
        assert found == pytest.approx((reward - mean) / (std + 1e-6), rel=1e-6, abs=1e-6)


@given(rewards=REWARDS)
def test_dr_grpo_and_leave_one_out_equal_their_definitions(rewards):
    size, total = len(rewards), math.fsum(rewards)
    pairs = zip(advantages.dr_grpo(rewards), advantages.rloo(rewards), rewards, strict=True)
    for centred, left_out, reward in pairs:
        assert centred == pytest.approx(reward - total / size, rel=1e-9, abs=1e-12)
        assert left_out == pytest.approx(reward - (total - reward) / (size - 1), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(rewards=REWARDS, shift=st.integers(0, 7))
def test_permuting_a_group_permutes_its_advantages(name, rewards, shift):
    compute = getattr(advantages, name)
    rolled = rewards[shift:] + rewards[:shift]
    found = compute(rewards)
    assert compute(rolled) == pytest.approx(found[shift:] + found[:shift], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("normalize", ["pooled", "per_turn", "first_return"])
@settings(max_examples=30)
@given(
    turns=st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=4), min_size=2, max_size=5), shift=st.integers(0, 4)
)
def test_permuting_a_group_permutes_its_turn_advantages(normalize, turns, shift):
    found = advantages.gtpo(turns, 0.9, normalize)
    rolled = advantages.gtpo(turns[shift:] + turns[:shift], 0.9, normalize)
    for row, other in zip(rolled, found[shift:] + found[:shift], strict=True):
        assert row == pytest.approx(other, rel=1e-6, abs=1e-6)


def test_a_group_of_one_and_an_empty_group_have_no_advantage():
    assert advantages.grpo([3.0]) == [0.0] and advantages.grpo([]) == []
    for compute in (advantages.dr_grpo, advantages.rloo):
        assert compute([3.0]) == [0.0] and compute([]) == []
    assert advantages.gtpo([[1.0, 2.0]]) == [[0.0, 0.0]]


def test_equal_and_nearly_equal_rewards_stay_bounded():
    assert advantages.grpo([0.4] * 3) == pytest.approx([0, 0, 0], abs=1e-9)
    assert max(map(abs, advantages.grpo([0.4, 0.4, 0.4 + 1e-9]))) < 2
    assert advantages.rloo([0.4, 0.4, 0.4 + 1e-9]) == pytest.approx([-5e-10, -5e-10, 1e-9], rel=1e-5)
    large = advantages.rloo([1e8, 1e8, 1e8 + 1])
    assert large == pytest.approx([-0.5, -0.5, 1.0], rel=1e-6)


def returns_reference(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (k - j) * rewards[k] for k in range(j, len(rewards))) for j in range(len(rewards))]


TURNS = st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=5), min_size=2, max_size=6)


@settings(max_examples=60)
@given(turns=TURNS, gamma=st.floats(0, 1))
def test_gtpo_equals_its_definition_in_every_normalisation(turns, gamma):
    returns = [returns_reference(rewards, gamma) for rewards in turns]
    pool = [value for row in returns for value in row]
    pooled = (statistics.fmean(pool), statistics.pstdev(pool))
    first = [row[0] for row in returns]
    for normalize in ("pooled", "per_turn", "first_return"):
        found = advantages.gtpo(turns, gamma, normalize)
        for row, values in zip(found, returns, strict=True):
            for j, value in enumerate(values):
                column = [other[j] for other in returns if len(other) > j]
                mean, std = {
                    "pooled": pooled,
                    "per_turn": pooled if len(column) < 2 else (statistics.fmean(column), statistics.stdev(column)),
                    "first_return": (statistics.fmean(first), statistics.stdev(first)),
                }[normalize]
                assert row[j] == pytest.approx((value - mean) / (std + 1e-6), rel=1e-6, abs=1e-6)


def test_gtpo_first_return_without_discount_and_turn_rewards_is_grpo():
    outcomes = [1.0, 0.0, 0.0, 1.0]
    turns = [[0.0] * index + [outcome] for index, outcome in enumerate(outcomes)]
    found = advantages.gtpo(turns, 1.0, "first_return")
    assert [row[0] for row in found] == pytest.approx(advantages.grpo(outcomes))


def test_without_discounted_outcomes_a_call_costs_nothing_by_itself():
    """The trap: with γ < 1 the direct right answer beats the right answer after a call at its first turn."""
    turns = [[0.0, 0.0], [0.0], [0.0], [-0.1, 0.0]]
    outcomes = [1.0, 1.0, 0.0, 0.0]
    paper = advantages.gtpo([[0.0, 1.0], [1.0], [0.0], [-0.1, 0.0]], 0.9)
    full = advantages.gtpo(turns, 0.9, outcomes=outcomes)
    assert paper[0][0] < paper[1][0]
    assert full[0][0] == full[0][1] == full[1][0]
    assert full[3][0] < full[3][1] == full[2][0]


def test_gtpo_outcome_divides_by_the_number_of_correct_ones_once():
    right, other, wrong = [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]
    assert advantages.gtpo_outcome([1, 1, 0], [right, other, wrong]) == pytest.approx([1, 1, 0.25])
    assert advantages.gtpo_outcome([1, 0, 0], [None, wrong, None]) == [1, 0, 0]
    assert advantages.gtpo_outcome([0, 0], [right, wrong]) == [0, 0]
    assert advantages.gtpo_outcome([1, 0], [right, [-1.0, 0.0]]) == [1, 0]  # a negative cosine counts 0


def test_only_what_the_policy_ended_and_acted_in_enters_a_group():
    group = [
        trajectory(0, ended=Outcome.NO_ANSWER, outcome=0.0, bonus=100.0),  # never acted
        trajectory(1, policy_turn(), ended=Outcome.ANSWERED, outcome=1.0),
        trajectory(2, policy_turn(), policy_turn(), ended=Outcome.LENGTH, outcome=0.0),
        trajectory(3, policy_turn(), ended=Outcome.INFRA_ERROR, outcome=50.0),
        trajectory(4, policy_turn(), ended=Outcome.REWARD_MISSING),
    ]
    for name in ("grpo", "dr_grpo", "rloo", "gtpo"):
        found = group_advantages(name, group)
        assert [len(row) for row in found] == [0, 1, 2, 1, 1]
        assert found[1][0] > 0 > found[2][0]
        assert found[3] == [0.0] and found[4] == [0.0]
    for name in ("grpo", "dr_grpo", "rloo"):
        one, other = getattr(advantages, name)([1.0, 0.0])
        assert group_advantages(name, group)[1:3] == [[pytest.approx(one)], [pytest.approx(other)] * 2]


def test_gtpo_on_trajectories_takes_their_own_rewards_for_the_outcome():
    group = [
        trajectory(0, policy_turn(), policy_turn(), ended=Outcome.ANSWERED, outcome=1.0),
        trajectory(
            1, policy_turn(), policy_turn(format=-0.1), ended=Outcome.ANSWERED, outcome=0.0, code_similarity=0.4
        ),
        trajectory(2, policy_turn(), ended=Outcome.ANSWERED, outcome=0.0),
    ]
    expected = advantages.gtpo([[0.0, 1.0], [0.0, 0.4 - 0.1], [0.0]], 0.9)
    assert group_advantages("gtpo", group) == [pytest.approx(row) for row in expected]
    full = advantages.gtpo([[0.0, 0.0], [0.0, -0.1], [0.0]], 0.9, outcomes=[1.0, 0.4, 0.0])
    assert group_advantages("gtpo", group, discount_outcome=False) == [pytest.approx(row) for row in full]


def test_a_reward_that_is_not_finite_is_refused_by_name():
    group = [trajectory(0, policy_turn(), outcome=math.nan), trajectory(1, policy_turn())]
    with pytest.raises(ValueError, match="trajectory t0"):
        group_advantages("grpo", group)


def test_an_unknown_advantage_names_the_nearest():
    with pytest.raises(UnknownName, match="gtpo"):
        group_advantages("gtpp", [])


def test_rounding_is_no_spread():
    sums = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1]
    assert sums[0] != sums[1] and not has_spread(sums)
    assert not has_spread([0.4] * 3) and not has_spread([0.4]) and not has_spread([])
    assert has_spread([0.4, 0.4, 0.4, 0.400001])


def test_embedder_is_deterministic_and_sees_likeness():
    def cosine(one: str, other: str) -> float:
        pairs = zip(embedders.hashed_ngrams(one), embedders.hashed_ngrams(other), strict=True)
        return sum(a * b for a, b in pairs)

    assert cosine("print(1+2)", "print(1+2)") == pytest.approx(1.0)
    assert cosine("print(1+2)", "print(1+3)") > cosine("print(1+2)", "import os")
    assert embedders.hashed_ngrams("") == [0.0] * embedders.DIMENSIONS
    assert len(embedders.hashed_ngrams("x = \ud800")) == embedders.DIMENSIONS  # a lone surrogate
