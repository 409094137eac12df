"""From recorded trajectories and supervised traces to training arrays."""

from __future__ import annotations

import numpy as np
import pytest

from learner.sequence import TrainSequence, sequences_from
from toolrl.trajectory import Outcome, Trajectory, Turn


def three_turns() -> Trajectory:
    """Two policy turns around an *empty* tool turn: only the recorded turns tell them apart. Then a shown tail."""
    return Trajectory(
        "t",
        "g",
        "task",
        0,
        [1, 2, 3],
        [
            Turn("policy", [4, 5], [-0.1, -0.2], [0, 0]),
            Turn("tool", []),
            Turn("policy", [6], [-0.3], [1]),
            Turn("tool", [7, 8]),
            Turn("policy", [9], [-0.4], [1]),
        ],
        outcome=Outcome.ANSWERED,
        temperature=0.7,
    )


def test_masks_turns_and_advantages_come_from_the_recorded_turns():
    (made,) = sequences_from([three_turns()], [[0.5, -1.0, 2.0]])
    assert made.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9] and made.prompt_length == 3
    assert made.policy_mask.tolist() == [True, True, True, False, False, True]
    assert made.turn_ids.tolist() == [0, 0, 1, -1, -1, 2]
    assert made.advantages.tolist() == [0.5, 0.5, -1.0, 0.0, 0.0, 2.0]
    np.testing.assert_allclose(made.rollout_logp, [-0.1, -0.2, -0.3, 0, 0, -0.4])
    assert (made.temperature, made.trajectory_id, made.group_id) == (0.7, "t", "g")


def test_advantages_may_come_one_a_policy_token():
    (made,) = sequences_from([three_turns()], [[0.5, 0.25, -1.0, 2.0]], per_token=True)
    assert made.advantages.tolist() == [0.5, 0.25, -1.0, 0.0, 0.0, 2.0]
    (by_turn,) = sequences_from([three_turns()], [[0.5, -1.0, 2.0]])
    (spread,) = sequences_from([three_turns()], [[0.5, 0.5, -1.0, 2.0]], per_token=True)
    assert spread.advantages.tolist() == by_turn.advantages.tolist()
    with pytest.raises(ValueError, match="trajectory t: 3 advantages for 4 policy tokens"):
        sequences_from([three_turns()], [[0.5, -1.0, 2.0]], per_token=True)


def test_advantages_of_tokens_follow_a_rewritten_history():
    rewritten = three_turns()
    rewritten.turns[3].fresh_context = True
    first, second = sequences_from([rewritten], [[0.5, 0.25, -1.0, 2.0]], per_token=True)
    assert first.advantages.tolist() == [0.5, 0.25, -1.0] and second.advantages.tolist() == [2.0]


def test_what_does_not_count_is_left_out():
    lost = three_turns()
    lost.outcome = Outcome.INFRA_ERROR
    silent = Trajectory("s", "g", "task", 1, [1], outcome=Outcome.NO_ANSWER)
    made = sequences_from([lost, three_turns(), silent], [[0.0] * 3, [1.0] * 3, []])
    assert [sequence.trajectory_id for sequence in made] == ["t"]


def test_contradictions_are_refused_by_name():
    with pytest.raises(ValueError, match="trajectory t: 2 advantages for 3 policy turns"):
        sequences_from([three_turns()], [[0.5, 1.0]])
    broken = three_turns()
    broken.turns[0].logprobs.pop()
    with pytest.raises(ValueError, match="trajectory t, turn 0"):
        sequences_from([broken], [[0.0] * 3])
    good = sequences_from([three_turns()], [[0.0] * 3])[0]
    fields = {name: getattr(good, name) for name in TrainSequence.__slots__}
    for change, words in (
        ({"prompt_length": 2}, "7 response tokens"),
        ({"temperature": 0.0}, "temperature"),
        ({"prompt_length": 0}, "empty prompt"),
    ):
        with pytest.raises(ValueError, match=words):
            TrainSequence(**(fields | change))
