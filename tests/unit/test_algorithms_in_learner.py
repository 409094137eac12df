"""Every algorithm as the learner's objective calls it: packed micro-batches, global counts, the turns' numbers, options."""

from __future__ import annotations

import pytest
import torch

from learner.metrics import Sums
from learner.objective import GlobalCounts, PolicyObjective
from learner.packing import PackedBatch, pack
from learner.sequence import sequences_from
from tests.unit.learner_fixtures import random_sequences
from toolrl.algorithms import aggregate, corrections, policy_losses, regularizers
from toolrl.config import AlgorithmConfig, Named
from toolrl.trajectory import Outcome, ToolResult, Trajectory, Turn

SEQUENCES = random_sequences(6)
PARTS = ([0, 1, 2, 3, 4, 5], [4], [5, 0], [3, 1, 2])  # the first is the whole
LOSSES = ("token", "gspo", "cispo", "ctpo", "cppo", "steppo")


def values_for(batch: PackedBatch, seed: int) -> torch.Tensor:
    """[M] numbers that depend only on the token, whatever micro-batch it is in."""
    return torch.sin(batch.targets * 0.7 + seed) * 0.02 - 6.2


def loss_of(objective: PolicyObjective, part: list[int]) -> torch.Tensor:
    batch = pack([SEQUENCES[index] for index in part])
    logp, old = values_for(batch, 0), values_for(batch, 1)
    return objective.loss(batch, logp, -logp, old, values_for(batch, 3), GlobalCounts.of(SEQUENCES), Sums())


@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up_to_the_whole_with_every_loss_and_term(name, how):
    config = AlgorithmConfig(
        policy_loss=Named(name),
        correction=None,
        aggregation=how,
        regularizers=[
            Named("sft", {"weight": 0.1}),
            Named("kl", {"weight": 0.1, "estimator": "k2"}),
            Named("llds", {"weight": 0.2, "mask_answer": True, "normalize": "all"}),
        ],
    )
    objective = PolicyObjective(config, max_response_tokens=50)
    whole, *parts = (loss_of(objective, part) for part in PARTS)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["tis", "icepop", "mis", "decoupled"])
def test_micro_batches_add_up_to_the_whole_with_every_correction(name, level):
    config = AlgorithmConfig(policy_loss=Named("steppo"), correction=Named(name, {"level": level}))
    objective = PolicyObjective(config, max_response_tokens=50)
    whole, *parts = (loss_of(objective, part) for part in PARTS)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)
    batch = pack(SEQUENCES)
    live, old = batch.grid(values_for(batch, 0)), batch.grid(values_for(batch, 1))
    tokens = policy_losses.steppo(
        live, old, batch.advantages, batch.policy_mask, batch.loss_mask, turn_ids=batch.turn_ids
    )
    weight = getattr(corrections, name)(old, batch.rollout_logp, batch.policy_mask, level=level)
    weight = weight if level == "token" else weight[:, None]
    torch.testing.assert_close(whole, aggregate(tokens.token_loss * weight, batch.loss_mask, "token_mean"))


def test_the_supervised_term_divides_by_the_supervised_tokens_of_the_whole_update():
    config = AlgorithmConfig(correction=None, regularizers=[Named("sft", {"weight": 1.0})])
    batch = pack(SEQUENCES)
    logp = values_for(batch, 0)
    sums = Sums()
    PolicyObjective(config, max_response_tokens=50).loss(
        batch, logp, -logp, values_for(batch, 1), None, GlobalCounts.of(SEQUENCES), sums
    )
    chosen = batch.loss_mask & (batch.advantages > 0)
    expected = aggregate(regularizers.sft(batch.grid(logp), chosen), chosen, "token_mean")
    assert float(sums.totals["term_sft"]) == pytest.approx(float(expected), rel=1e-6)


def test_valid_calls_are_averaged_over_trajectories_not_over_their_segments():
    def shown(status: str) -> Turn:
        return Turn("tool", [7], results=[ToolResult("c", "python", status, "")])

    def acted() -> Turn:
        return Turn("policy", [4], [-0.1], [0])

    rewritten = shown("error")
    rewritten.fresh_context = True
    trajectories = [
        Trajectory("a", "g", "task", 0, [1], [acted(), shown("ok"), acted(), rewritten, acted()]),
        Trajectory("b", "g", "task", 1, [1], [acted(), shown("invalid_call"), acted()]),
    ]
    for trajectory in trajectories:
        trajectory.outcome = Outcome.ANSWERED
    sequences = sequences_from(trajectories, [[0.0] * 3, [0.0] * 2])
    assert [(s.trajectory_id, s.valid_calls) for s in sequences] == [("a", 2), ("a", 2), ("b", 0)]
    assert GlobalCounts.of(sequences).valid_calls == 1.0
