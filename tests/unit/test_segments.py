"""A trajectory whose template rewrote its history: each context is trained as the model saw it, every sampled token once."""

from __future__ import annotations

import pytest

from learner.sequence import sequences_from
from toolrl.trajectory import Outcome, Trajectory, Turn


def policy(*ids: int) -> Turn:
    return Turn("policy", list(ids), [-0.5] * len(ids), [0] * len(ids))


def rewritten() -> Trajectory:
    turns = [
        policy(10, 11),
        Turn("tool", [20]),
        policy(12),
        Turn("tool", [1, 2, 3], fresh_context=True),
        policy(13, 14, 15),
    ]
    return Trajectory("t", "g", "task", 0, [1, 2], turns, outcome=Outcome.ANSWERED)


def test_a_fresh_context_hides_what_came_before_it() -> None:
    assert rewritten().context_ids == [1, 2, 3, 13, 14, 15]


def test_segments_hold_every_sampled_token_once_behind_its_own_prompt() -> None:
    first, second = rewritten().segments()
    assert (first.prompt_ids, first.response_ids) == ([1, 2], [10, 11, 20, 12])
    assert (second.prompt_ids, second.response_ids) == ([1, 2, 3], [13, 14, 15])


def test_a_history_that_was_kept_is_one_segment() -> None:
    whole = rewritten()
    whole.turns[3].fresh_context = False
    assert whole.segments() == [whole]


def test_each_segment_is_trained_with_the_advantages_of_its_own_turns() -> None:
    first, second = sequences_from([rewritten()], [[1.0, 2.0, 3.0]])
    assert first.token_ids.tolist() == [1, 2, 10, 11, 20, 12]
    assert first.advantages.tolist() == [1.0, 1.0, 0.0, 2.0]
    assert first.policy_mask.tolist() == [True, True, False, True]
    assert second.token_ids.tolist() == [1, 2, 3, 13, 14, 15]
    assert second.advantages.tolist() == [3.0, 3.0, 3.0]


def test_a_fresh_context_in_which_nothing_was_sampled_is_not_trained() -> None:
    ended = rewritten()
    ended.turns.pop()
    assert [len(s.token_ids) for s in sequences_from([ended], [[1.0, 2.0]])] == [6]


def test_a_policy_turn_cannot_begin_a_fresh_context() -> None:
    broken = rewritten()
    broken.turns[4].fresh_context = True
    with pytest.raises(ValueError, match="only a tool turn"):
        broken.check()
