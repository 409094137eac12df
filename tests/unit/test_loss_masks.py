"""Which turns enter the loss, and that leaving one out changes nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.packing import pack
from learner.sequence import TrainSequence, sequences_from
from toolrl.algorithms import policy_losses
from toolrl.loss_masks import turns_in_loss, void_turns
from toolrl.trajectory import CallError, Outcome, ToolCall, Trajectory, Turn


def policy(*ids: int, calls: int = 0, errors: int = 0) -> Turn:
    made = [ToolCall(f"c{index}", "python", {}) for index in range(calls)]
    broken = [CallError("bad_json", "") for _ in range(errors)]
    return Turn("policy", list(ids), [-0.5] * len(ids), [0] * len(ids), calls=made, call_errors=broken)


def episode(
    turns: list[Turn], outcome: Outcome = Outcome.ANSWERED, answer: str | None = "4", name: str = "t"
) -> Trajectory:
    shown = [part for turn in turns for part in (turn, Turn("tool", [90, 91]))][:-1]
    return Trajectory(name, "g", "task", 0, [1, 2], shown, outcome=outcome, answer=answer)


def wandering() -> Trajectory:
    """A call, a turn that only talks (its format was broken), a call beside a broken one, the answer."""
    return episode([policy(10, 11, calls=1), policy(12, 13, 14, errors=1), policy(15, calls=1, errors=1), policy(16)])


def test_a_void_turn_holds_neither_a_complete_call_nor_the_final_answer():
    assert void_turns(wandering()) == [False, True, False, False]
    assert void_turns(episode([policy(10, calls=1), policy(11)], Outcome.NO_ANSWER, None)) == [False, True]
    # Cut short: nothing was read from its text as an answer, but a call that came whole before the cut counts.
    assert void_turns(episode([policy(10, calls=1), policy(11)], Outcome.LENGTH, None)) == [False, True]
    assert void_turns(episode([policy(10, calls=1)], Outcome.LENGTH, None)) == [False]
    assert void_turns(episode([policy(10, calls=1)], Outcome.TOOL_LIMIT, None)) == [False]


def test_what_is_kept_in_the_loss_follows_the_choices():
    lost = episode([policy(10, calls=1), policy(11)], Outcome.LENGTH, None)
    assert turns_in_loss(wandering()) == [True] * 4
    assert turns_in_loss(wandering(), void_turns_are="mask") == [True, False, True, True]
    assert turns_in_loss(wandering(), void_turns_are="drop_trajectory") == [False] * 4
    assert turns_in_loss(wandering(), truncated_are="mask") == [True] * 4
    assert turns_in_loss(lost, truncated_are="mask") == [False, False]
    clean = episode([policy(10, calls=1), policy(11)])
    assert turns_in_loss(clean, void_turns_are="drop_trajectory", truncated_are="mask") == [True, True]
    with pytest.raises(ValueError, match="'skip'; known: train, mask, drop_trajectory"):
        turns_in_loss(clean, void_turns_are="skip")
    with pytest.raises(ValueError, match="'drop'; known: train, mask"):
        turns_in_loss(clean, truncated_are="drop")


def test_a_masked_turn_leaves_the_loss_only():
    (all_in,), (masked,) = (
        sequences_from([wandering()], [[1.0, 2.0, 3.0, 4.0]], void_turns=how) for how in ("train", "mask")
    )
    for name in set(TrainSequence.__slots__) - {"loss_mask"}:
        assert np.array_equal(getattr(all_in, name), getattr(masked, name)), name
    assert all_in.loss_mask.tolist() == all_in.policy_mask.tolist()
    assert masked.loss_mask[masked.turn_ids == 1].tolist() == [False] * 3
    assert (masked.loss_mask == masked.policy_mask)[masked.turn_ids != 1].all()


@pytest.mark.parametrize("loss", ["ctpo", "gspo", "token", "cispo", "cppo", "steppo"])
def test_ratios_of_the_other_tokens_are_bit_equal_when_a_void_turn_is_masked(loss):
    generator = torch.Generator().manual_seed(3)
    others = episode([policy(20, calls=1), policy(21, 22)], name="u")
    batches = [
        pack(sequences_from([wandering(), others], [[1.0, -2.0, -1.0, 0.5], [-1.0, 1.0]], void_turns=how))
        for how in ("train", "mask", "drop_trajectory")
    ]
    shape = batches[0].policy_mask.shape
    logp = torch.randn(shape, generator=generator)
    old = logp + 0.3 * torch.randn(shape, generator=generator)
    turns = {"turn_ids": batches[0].turn_ids} if loss == "steppo" else {}
    losses = [
        getattr(policy_losses, loss)(logp, old, b.advantages, b.policy_mask, b.loss_mask, **turns).token_loss
        for b in batches
    ]
    for batch, token_loss in zip(batches[1:], losses[1:], strict=True):
        assert not torch.equal(batch.loss_mask, batch.policy_mask)
        assert torch.equal(token_loss[batch.loss_mask], losses[0][batch.loss_mask])
        assert torch.equal(batch.loss_mask & ~batch.policy_mask, torch.zeros_like(batch.loss_mask))


def test_truncated_trajectories_leave_the_loss_whole_and_stay_in_their_place():
    lost = episode([policy(10, calls=1), policy(11)], Outcome.LENGTH, None, name="lost")
    made = sequences_from([lost, wandering()], [[1.0, 1.0], [1.0] * 4], truncated="mask")
    assert [sequence.trajectory_id for sequence in made] == ["lost", "t"]
    assert not made[0].loss_mask.any() and made[0].policy_mask.sum() == 2
    assert made[1].loss_mask.tolist() == made[1].policy_mask.tolist()


def test_void_turns_are_found_across_a_history_that_was_rewritten():
    split = wandering()
    split.turns[3] = Turn("tool", [1, 2, 3], fresh_context=True)  # after the void turn
    first, second = sequences_from([split], [[1.0] * 4], void_turns="mask")
    assert first.loss_mask.tolist() == [True, True, False, False, False, False, False]
    assert second.loss_mask.tolist() == [True, False, False, True]
