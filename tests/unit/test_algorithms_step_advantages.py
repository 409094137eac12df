"""Advantages over steps with a critic's values, and GEAR, against their definitions; plain and on recorded trajectories."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolrl.algorithms import advantages, group_advantages
from toolrl.algorithms.advantages.gear import onset_divergence
from toolrl.algorithms.registries import advantage_registry, value_targets
from toolrl.reward_records import await_rewards
from toolrl.trajectory import Outcome, Trajectory, Turn

NUMBER = st.floats(-3, 3)
STEPS = st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=6)
BATCHES = st.lists(STEPS, min_size=1, max_size=5)
SHARE = st.floats(0, 1)
FEW = settings(max_examples=40, deadline=None)


def split(batch: Sequence[Sequence[tuple[float, float]]]) -> tuple[list[list[float]], list[list[float]]]:
    """(rewards, values)"""
    return [[r for r, _ in row] for row in batch], [[v for _, v in row] for row in batch]


def gae_reference(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The double sum: Â_j = Σ_l (γλ)^l δ_{j+l}."""
    ahead = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, ahead, values, strict=True)]
    size = len(deltas)
    return [math.fsum((gamma * lam) ** (k - j) * deltas[k] for k in range(j, size)) for j in range(size)]


def lambda_reference(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """G_j^λ from its n-step returns; the last takes the remaining weight λ^{N−1}."""
    found = []
    for j in range(len(rewards)):
        left = len(rewards) - j
        steps = []
        for n in range(1, left + 1):
            tail = gamma**n * values[j + n] if n < left else 0.0
            steps.append(math.fsum(gamma**k * rewards[j + k] for k in range(n)) + tail)
        shares = [(1 - lam) * lam ** (n - 1) for n in range(1, left)] + [lam ** (left - 1)]
        assert math.fsum(shares) == pytest.approx(1.0)
        found.append(math.fsum(w * g for w, g in zip(shares, steps, strict=True)))
    return found


@FEW
@given(batch=BATCHES, gamma=SHARE, lam=SHARE)
def test_steppo_is_the_discounted_sum_of_the_critics_surprises(batch, gamma, lam):
    rewards, values = split(batch)
    expected = [gae_reference(r, v, gamma, lam) for r, v in zip(rewards, values, strict=True)]
    found = advantages.steppo(rewards, values, gamma, lam, whiten=False)
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    pool = [value for row in expected for value in row]
    mean, std = statistics.fmean(pool), statistics.stdev(pool) if len(pool) > 1 else 0.0
    for row, wanted in zip(advantages.steppo(rewards, values, gamma, lam), expected, strict=True):
        for value, plain in zip(row, wanted, strict=True):
            assert value == pytest.approx((plain - mean) / (std + 1e-8), rel=1e-5, abs=1e-5)
    for row, wanted, v in zip(advantages.steppo_returns(rewards, values, gamma, lam), expected, values, strict=True):
        assert row == pytest.approx([a + b for a, b in zip(wanted, v, strict=True)], rel=1e-9, abs=1e-9)


@FEW
@given(steps=STEPS, gamma=SHARE, lam=SHARE)
def test_lambda_return_weighs_the_n_step_returns(steps, gamma, lam):
    (rewards,), (values,) = split([steps])
    found = advantages.lambda_return(rewards, values, gamma, lam)
    assert found == pytest.approx(lambda_reference(rewards, values, gamma, lam), rel=1e-9, abs=1e-9)
    (same,) = advantages.steppo_returns([rewards], [values], gamma, lam)  # G^λ − V is GAE
    assert found == pytest.approx(same, rel=1e-9, abs=1e-9)
    assert advantages.lambda_return(rewards, values, gamma, 1.0) == pytest.approx(
        [math.fsum(gamma ** (k - j) * rewards[k] for k in range(j, len(rewards))) for j in range(len(rewards))]
    )


def test_a_trajectory_that_was_cut_off_goes_on_with_the_critics_value():
    """As if one more step with that reward had followed."""
    longer = advantages.lambda_return([0.1, 0.2, 0.7], [0.3, 0.4, 0.7], 0.9, 0.5)
    assert advantages.lambda_return([0.1, 0.2], [0.3, 0.4], 0.9, 0.5, bootstrap=0.7) == pytest.approx(longer[:2])


def test_values_that_do_not_fit_the_steps_are_refused():
    with pytest.raises(ValueError, match="2 steps but 1 values"):
        advantages.steppo([[0.0, 1.0]], [[0.5]])
    with pytest.raises(ValueError, match="2 turns but 3 values"):
        advantages.lambda_return([0.0, 1.0], [0.5, 0.5, 0.5], 0.9, 0.9)
    with pytest.raises(ValueError, match="shorter"):
        advantages.steppo([[0.0], [1.0]], [[0.5]])


def test_a_batch_of_one_step_is_whitened_to_zero_and_an_empty_one_stays_empty():
    assert advantages.steppo([[1.0]], [[0.2]]) == [[0.0]] and advantages.steppo([], []) == []
    assert advantages.steppo([[], [1.0], [0.0]], [[], [0.0], [0.0]])[0] == []


def turn(tokens: int, **rewards: float) -> Turn:
    return Turn("policy", [5] * tokens, [-0.1] * tokens, [0] * tokens, rewards=rewards)


def recorded(index: int, *turns: Turn, group: str = "g", **rewards: float) -> Trajectory:
    return Trajectory(f"t{index}", group, "task", index, [1], list(turns), outcome=Outcome.ANSWERED, rewards=rewards)


BATCH = [
    recorded(0, turn(2), Turn("tool", []), turn(1, format=-0.1), outcome=1.0, cost=-0.2),
    recorded(1, turn(3), outcome=0.0),
]
VALUES = [[0.5, 0.6], [0.3]]


@pytest.mark.parametrize(("name", "lam"), [("steppo", 1.0), ("lambda_return", 0.95)])
def test_on_recorded_trajectories_the_last_turn_holds_what_the_trajectory_earned(name, lam):
    compute = advantage_registry.get(name)
    rewards = [[0.0, -0.1 + 1.0 - 0.2], [0.0]]
    expected = advantages.steppo(rewards, VALUES, 0.99, lam, whiten=False)
    for row, wanted in zip(compute(BATCH, VALUES, whiten=False), expected, strict=True):
        assert row == pytest.approx(wanted)
    for row, wanted in zip(compute(BATCH, VALUES), advantages.steppo(rewards, VALUES, 0.99, lam), strict=True):
        assert row == pytest.approx(wanted)
    targets = value_targets(compute)
    assert targets is not None
    for whiten in (True, False):
        found = targets(BATCH, VALUES, whiten=whiten, gamma=0.9)
        for row, wanted in zip(found, advantages.steppo_returns(rewards, VALUES, 0.9, lam), strict=True):
            assert row == pytest.approx(wanted)
    assert BATCH[0].turn_rewards == [0.0, -0.1]  # the records are as they were


@pytest.mark.parametrize("name", ["steppo", "lambda_return", "gear"])
def test_an_advantage_that_needs_evidence_is_no_group_advantage(name):
    with pytest.raises(ValueError, match="needs evidence"):
        group_advantages(name, BATCH)


@FEW
@given(batch=BATCHES, shift=st.integers(0, 4))
def test_the_order_of_trajectories_changes_nothing(batch, shift):
    def rolled(rows: list) -> list:
        return rows[shift % len(rows) :] + rows[: shift % len(rows)]

    rewards, values = split(batch)
    found = rolled(advantages.steppo(rewards, values))
    for row, other in zip(advantages.steppo(rolled(rewards), rolled(values)), found, strict=True):
        assert row == pytest.approx(other, rel=1e-6, abs=1e-6)


def gear_reference(
    a: float, teacher: list[float], logp: list[float], entropy: list[float], median: float
) -> list[float]:
    """Segments first, as ranges; then the weights. κ = 1, c = 2."""
    d = [x - y for x, y in zip(teacher, logp, strict=True)]
    segments, start = [], 0
    while start < len(d):
        end = start + 1
        if d[start] < -1:
            while end < len(d) and entropy[end] >= median:
                end += 1
        segments.append((start, end))
        start = end
    weights = []
    for start, end in segments:
        exponent = math.copysign(1, a) * d[start] if a else 0.0
        weights += [min(2.0, max(0.5, math.exp(exponent)))] * (end - start)
    return [a * w * len(weights) / math.fsum(weights) for w in weights]


TOKENS = st.lists(st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(0, 3)), min_size=1, max_size=12)


@FEW
@given(rows=st.lists(st.tuples(st.sampled_from([-1.3, 0.0, 0.7]), TOKENS), min_size=1, max_size=4))
def test_gear_shapes_grpo_by_segments_and_keeps_each_trajectorys_sum(rows):
    scale = [a for a, _ in rows]
    teacher, logp, entropy = ([[triple[part] for triple in row] for _, row in rows] for part in range(3))
    median = statistics.median(value for row in entropy for value in row)
    found = advantages.gear(scale, teacher, logp, entropy)
    for a, given_row, *columns in zip(scale, found, teacher, logp, entropy, strict=True):
        assert given_row == pytest.approx(gear_reference(a, *columns, median), rel=1e-9)
        assert math.fsum(given_row) == pytest.approx(a * len(given_row), rel=1e-9, abs=1e-9)
        assert all(value * a > 0 or a == value == 0 for value in given_row)
    flat = advantages.gear(scale, teacher, logp, entropy, clip=1.0)
    assert flat == [[a] * len(row) for a, row in zip(scale, entropy, strict=True)]


def test_a_spike_opens_a_segment_that_a_certain_token_closes_and_may_open_again():
    divergence = [0.2, -1.5, 0.3, -3.0, 0.4, -2.0, 0.1]
    entropy = [1.0, 1.0, 1.0, 1.0, 0.2, 0.2, 1.0]
    #                     ^ opens       held; ^ closes, ^ opens again though certain itself
    assert onset_divergence(divergence, entropy, median=0.5) == [0.2, -1.5, -1.5, -1.5, 0.4, -2.0, -2.0]
    assert onset_divergence(divergence, entropy, median=0.5, kappa=9.0) == divergence


def test_gear_on_recorded_trajectories_takes_each_groups_own_grpo_and_the_batchs_median():
    batch = [
        recorded(0, turn(2), turn(1), outcome=1.0),
        recorded(1, turn(1), group="other", outcome=5.0),
        recorded(2, turn(2), outcome=0.0),
        recorded(3, turn(3), group="other", outcome=3.0),
    ]
    evidence = [[(-0.5 * k - i, -1.0, 0.3 * k + 0.1 * i) for k in range(n)] for i, n in enumerate((3, 1, 2, 3))]
    one, other = advantages.grpo([1.0, 0.0]), advantages.grpo([5.0, 3.0])
    columns = [[[triple[part] for triple in row] for row in evidence] for part in range(3)]
    expected = advantages.gear([one[0], other[0], one[1], other[1]], *columns)
    assert advantage_registry.get("gear")(batch, evidence) == expected
    assert [len(row) for row in expected] == [3, 1, 2, 3]


def test_gear_bounds_an_impossible_token_and_refuses_what_is_no_number():
    (found,) = advantages.gear([1.0], [[-math.inf, -1.0]], [[-1.0, -1.0]], [[1.0, 0.5]])
    assert found == pytest.approx([2 / 3, 4 / 3])  # weights .5 and 1; the second token's entropy closes the segment
    with pytest.raises(ValueError, match="policy token 1"):
        advantages.gear([1.0], [[0.0, math.nan]], [[0.0, 0.0]], [[1.0, 1.0]])
    with pytest.raises(ValueError, match=r"clip=0\.5"):
        advantages.gear([], [], [], [], clip=0.5)


def test_a_trajectory_trained_before_its_reward_came_is_cut_off_before_its_last_turn():
    """Its known turns are judged by the critic's value of the last one, which is neither encouraged nor discouraged."""
    early = recorded(2, turn(2, format=-0.1), Turn("tool", []), turn(1), Turn("tool", []), turn(1, format=-0.1))
    await_rewards(early, {"judge": 1.0})
    batch, values = [*BATCH, early], [*VALUES, [0.2, 0.5, 0.8]]
    compute = advantage_registry.get("lambda_return")
    targets = value_targets(compute)
    assert targets is not None
    returns = targets(batch, values, gamma=0.9, lam=0.5)
    assert returns[2] == pytest.approx(
        [*advantages.lambda_return([-0.1, 0.0], [0.2, 0.5], 0.9, 0.5, bootstrap=0.8), 0.8]
    )
    assert returns[:2] == targets(BATCH, VALUES, gamma=0.9, lam=0.5)
    plain = compute(batch, values, gamma=0.9, lam=0.5, whiten=False)
    assert plain[2] == pytest.approx([g - v for g, v in zip(returns[2], values[2], strict=True)])
    white = compute(batch, values, gamma=0.9, lam=0.5)
    assert plain[2][-1] == white[2][-1] == 0.0
    judged = [value for row in (*white[:2], white[2][:-1]) for value in row]
    assert statistics.fmean(judged) == pytest.approx(0.0, abs=1e-9)
    assert statistics.stdev(judged) == pytest.approx(1.0, abs=1e-6)
    alone = recorded(3, turn(2))
    await_rewards(alone, {"judge": 1.0})
    assert compute([alone, BATCH[0]], [[0.4], VALUES[0]])[0] == [0.0]
