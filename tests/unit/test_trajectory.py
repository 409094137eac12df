"""Masks, ids and sums of a trajectory come from its recorded turns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.trajectory_strategies import trajectories
from toolrl.trajectory import Outcome, Trajectory, Turn, groups_of, staleness


def two_turns(**changes: object) -> Trajectory:
    turns = [
        Turn("policy", [5, 6, 7], [-0.1, -0.2, -0.3], [3, 3, 4], rewards={"format": -0.1}),
        Turn("tool", [8, 9]),
        Turn("policy", [10], [-0.4], [4], rewards={"call_cost": -0.2}),
    ]
    fields = {"turns": turns, "outcome": Outcome.ANSWERED, "rewards": {"outcome": 1.0, "overlong": -0.5}} | changes
    return Trajectory("t", "g", "task", 0, [1, 2], **fields)  # type: ignore[arg-type]


@settings(max_examples=60)
@given(trajectories())
def test_every_view_of_the_response_has_the_same_length(trajectory: Trajectory) -> None:
    trajectory.outcome = None
    trajectory.check()
    n = len(trajectory.response_ids)
    assert len(trajectory.policy_mask()) == len(trajectory.turn_ids()) == len(trajectory.rollout_logprobs()) == n
    assert trajectory.token_ids == trajectory.prompt_ids + trajectory.response_ids
    assert trajectory.policy_mask() == [index >= 0 for index in trajectory.turn_ids()]


def test_mask_turn_ids_and_logprobs_follow_the_turns() -> None:
    trajectory = two_turns()
    assert trajectory.response_ids == [5, 6, 7, 8, 9, 10]
    assert trajectory.policy_mask() == [True, True, True, False, False, True]
    assert trajectory.turn_ids() == [0, 0, 0, -1, -1, 1]
    assert trajectory.rollout_logprobs() == [-0.1, -0.2, -0.3, 0.0, 0.0, -0.4]


def test_turn_boundary_survives_a_tool_that_returns_nothing() -> None:
    trajectory = two_turns()
    trajectory.turns[1].token_ids = []
    assert trajectory.turn_ids() == [0, 0, 0, 1]


def test_reward_is_the_trajectorys_and_its_turns() -> None:
    trajectory = two_turns()
    assert trajectory.outcome_reward == 0.5
    assert trajectory.turn_rewards == [-0.1, -0.2]
    assert trajectory.reward == pytest.approx(0.2)


def test_staleness_counts_from_the_oldest_token() -> None:
    assert two_turns().oldest_version == 3
    assert staleness(two_turns(), 5) == 2
    assert staleness(two_turns(), 2) == 0
    assert staleness(two_turns(turns=[]), 9) == 0


def test_check_refuses_a_mask_that_does_not_fit_its_tokens() -> None:
    broken = two_turns()
    broken.turns[0].logprobs.pop()
    with pytest.raises(ValueError, match=r"trajectory t, turn 0: .*\(3, 2, 3\)"):
        broken.check()


def test_check_refuses_sampled_data_on_a_tool_turn() -> None:
    broken = two_turns()
    broken.turns[1].weight_versions = [1, 1]
    with pytest.raises(ValueError, match="turn 1: a tool turn holds"):
        broken.check()


def test_check_refuses_a_trained_outcome_without_a_policy_turn() -> None:
    with pytest.raises(ValueError, match="without a policy turn"):
        two_turns(turns=[]).check()
    two_turns(turns=[], outcome=Outcome.INFRA_ERROR).check()


def test_every_outcome_is_trained_reissued_or_the_tasks_fault() -> None:
    for outcome in Outcome:
        assert outcome.trained + outcome.reissued + (outcome is Outcome.REWARD_MISSING) == 1


def test_groups_are_in_sample_order() -> None:
    members = [Trajectory(f"{group}{i}", group, "task", i, []) for i in (2, 0, 1) for group in "ab"]
    groups = groups_of(members)
    assert list(groups) == ["a", "b"]
    assert [t.sample_index for t in groups["b"]] == [0, 1, 2]
