"""The loss of a micro-batch: global normalisation, corrections, regularisers, metrics that combine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.metrics import Sums
from learner.objective import GlobalCounts, PolicyObjective, supervised_loss
from learner.packing import PackedBatch, pack
from tests.unit.learner_fixtures import random_sequences
from toolrl.algorithms import aggregate, corrections, policy_losses, regularizers
from toolrl.config import AlgorithmConfig, Named
from toolrl.registry import UnknownName

SEQUENCES = random_sequences(10)


def values_for(batch: PackedBatch, seed: int) -> torch.Tensor:
    """[M] numbers that depend only on the token, whatever micro-batch it is in."""
    return torch.sin(batch.targets * 0.7 + seed) * 0.3 - 6.2


def run(objective: PolicyObjective, parts: list[list[int]]) -> tuple[float, dict[int, torch.Tensor], Sums]:
    """(summed loss, gradient on each sequence's log-probabilities, sums) with the batch cut into `parts`."""
    counts, sums, total, grads = GlobalCounts.of(SEQUENCES), Sums(), 0.0, {}
    for part in parts:
        batch = pack([SEQUENCES[index] for index in part])
        logp = values_for(batch, 0).requires_grad_()
        loss = objective.loss(
            batch, logp, -values_for(batch, 2), values_for(batch, 1), values_for(batch, 3), counts, sums
        )
        loss.backward()
        total += float(loss)
        grid = batch.grid(logp.grad)
        for row, index in enumerate(part):
            grads[index] = grid[row][batch.policy_mask[row]]
    return total, grads, sums


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_micro_batches_add_up_to_the_whole(aggregation):
    config = AlgorithmConfig(
        aggregation=aggregation,
        regularizers=[Named("kl", {"weight": 0.1}), Named("llds", {"weight": 0.2}), Named("entropy", {"weight": 0.01})],
    )
    objective = PolicyObjective(config, max_response_tokens=50)
    everything = list(range(len(SEQUENCES)))
    whole, grads, sums = run(objective, [everything])
    for parts in ([[0, 1, 2], [3], [4, 5, 6, 7, 8, 9]], [[index] for index in reversed(everything)]):
        loss, part_grads, part_sums = run(objective, parts)
        assert loss == pytest.approx(whole, rel=1e-5)
        for index in everything:
            torch.testing.assert_close(part_grads[index], grads[index], rtol=1e-5, atol=1e-8)
        assert part_sums.ratio_metrics() == pytest.approx(sums.ratio_metrics(), rel=1e-9)
        for name, value in sums.totals.items():
            assert float(part_sums.totals[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-7)
        assert float(part_sums.largest["gap"]) == float(sums.largest["gap"])


def test_the_loss_is_the_sum_of_the_published_parts():
    config = AlgorithmConfig(regularizers=[Named("kl", {"weight": 0.1}), Named("llds", {"weight": 0.2})])
    objective = PolicyObjective(config, max_response_tokens=50)
    batch = pack(SEQUENCES)
    logp, old, ref = (values_for(batch, seed) for seed in (0, 1, 3))
    sums = Sums()
    found = objective.loss(batch, logp, logp, old, ref, GlobalCounts.of(SEQUENCES), sums)
    live, frozen = batch.grid(logp), batch.grid(old)
    tokens = policy_losses.ctpo(live, frozen, batch.advantages, batch.policy_mask, batch.loss_mask).token_loss
    weight = corrections.tis(frozen, batch.rollout_logp, batch.policy_mask)
    kl = regularizers.kl(live, batch.grid(ref), batch.loss_mask)
    expected = (
        aggregate(tokens * weight, batch.loss_mask, "token_mean")
        + 0.1 * aggregate(kl, batch.loss_mask, "token_mean")
        + 0.2 * regularizers.llds(live, frozen, batch.policy_mask, batch.advantages, batch.turn_ids)
    )
    torch.testing.assert_close(found, expected)
    masks = np.concatenate([sequence.policy_mask for sequence in SEQUENCES])
    assert float(sums.totals["tokens"]) == masks.sum()
    gap = (frozen - batch.rollout_logp).abs()[batch.policy_mask]
    assert float(sums.totals["gap"]) == pytest.approx(float(gap.double().sum()), rel=1e-6)


def test_an_added_weight_is_the_same_as_a_configured_one():
    configured = [Named("kl", {"weight": 0.3, "estimator": "k2"}), Named("llds", {"weight": 0.5})]
    everything = [list(range(len(SEQUENCES)))]
    loss, grads, _ = run(PolicyObjective(AlgorithmConfig(regularizers=configured), max_response_tokens=50), everything)
    little = [Named("kl", {"weight": 0.1, "estimator": "k2"})]
    objective = PolicyObjective(AlgorithmConfig(regularizers=little), max_response_tokens=50)
    plain, *_ = run(objective, everything)
    objective.add_weights({"kl": 0.2, "llds": 0.5})
    mine, mine_grads, _ = run(objective, everything)
    assert mine == pytest.approx(loss, rel=1e-6) and abs(mine - plain) > 1e-3
    for index, grad in grads.items():
        torch.testing.assert_close(mine_grads[index], grad, rtol=1e-5, atol=1e-8)
    objective.add_weights({"kl": 0.0, "llds": 0.0})
    assert run(objective, everything)[0] == plain


def test_kl_to_the_reference_is_read_while_it_weighs_something():
    objective = PolicyObjective(AlgorithmConfig(regularizers=[]), max_response_tokens=50)
    assert not objective.reads_reference
    objective.add_weights({"kl": 0.1, "llds": 0.0})
    assert objective.reads_reference and [term.name for term in objective.terms] == ["kl"]
    objective.add_weights({"kl": 0.0})
    assert not objective.reads_reference and not objective.terms


def test_without_old_logprobs_the_ratio_is_one():
    batch = pack(SEQUENCES)
    logp = values_for(batch, 0).requires_grad_()
    sums = Sums()
    objective = PolicyObjective(AlgorithmConfig(correction=None), max_response_tokens=50)
    loss = objective.loss(batch, logp, logp.detach(), None, None, GlobalCounts.of(SEQUENCES), sums)
    metrics = sums.ratio_metrics()
    assert metrics["ratio/max"] == 1 and metrics["ratio/clip_fraction"] == 0
    expected = -aggregate(batch.advantages, batch.loss_mask, "token_mean")
    torch.testing.assert_close(loss, expected)


def test_a_nan_in_a_trained_token_reaches_the_loss_and_one_outside_does_not():
    objective = PolicyObjective(AlgorithmConfig(), max_response_tokens=50)
    counts = GlobalCounts.of(SEQUENCES)
    batch = pack(SEQUENCES)
    logp = values_for(batch, 0)
    clean = objective.loss(batch, logp, logp, values_for(batch, 1), None, counts, Sums())
    batch.rollout_logp[~batch.policy_mask] = float("nan")
    batch.advantages[~batch.policy_mask] = float("nan")
    again = objective.loss(batch, logp, logp, values_for(batch, 1), None, counts, Sums())
    assert torch.equal(clean, again)
    broken = logp.clone()
    broken[3] = float("nan")
    assert torch.isnan(objective.loss(batch, broken, logp, values_for(batch, 1), None, counts, Sums()))


def test_supervised_loss_is_the_mean_over_supervised_tokens_even_of_one():
    one = random_sequences(1, longest=4, seed=1)
    batch = pack(one)
    logp = values_for(batch, 0)
    loss = supervised_loss(batch, logp, logp, GlobalCounts.of(one), Sums())
    torch.testing.assert_close(loss, -logp.mean())
    assert float(loss) > 0


def test_unknown_names_fail_at_construction():
    for config, word in (
        (AlgorithmConfig(policy_loss=Named("ctop")), "ctpo"),
        (AlgorithmConfig(correction=Named("tiss")), "tis"),
        (AlgorithmConfig(regularizers=[Named("kll")]), "kl"),
    ):
        with pytest.raises(UnknownName, match=word):
            PolicyObjective(config, max_response_tokens=1)


def test_a_regulariser_of_weight_zero_needs_no_reference():
    objective = PolicyObjective(AlgorithmConfig(regularizers=[Named("kl", {"weight": 0.0})]), max_response_tokens=1)
    assert not objective.needs_reference
