"""Corrections for the gap between engine and trainer against their definitions, in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.algorithm_references import Batch, clipped_loss, poisoned, recorded_batch
from toolrl.algorithms import aggregate, corrections, policy_losses


def wide_batch(seed: int) -> Batch:
    """Gaps large enough for every bound to bind somewhere."""
    batch = recorded_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    gap = torch.randn(batch["old_logp"].shape, generator=generator, dtype=torch.float64)
    return batch | {"rollout_logp": batch["old_logp"] - 1.5 * gap}


def weights(name: str, batch: Batch, **options: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(corrections, name)(
        batch["old_logp"], batch["rollout_logp"], batch["policy_mask"], **options
    )
    return found


RULES: dict[tuple[str, str], Any] = {
    ("tis", ""): lambda k: min(k, 2.0),
    ("icepop", ""): lambda k: k if 0.5 <= k <= 5.0 else 0.0,
    ("mis", ""): lambda k: float(0.5 <= k <= 2.0),
    ("decoupled", ""): lambda k: min(k, 5.0),
    ("decoupled", "drop"): lambda k: k if k <= 5.0 else 0.0,
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("name", "above_cap"), RULES)
def test_weights_equal_their_definition_at_both_levels(name, above_cap, level):
    options = {"level": level} | ({"above_cap": above_cap} if above_cap else {})
    bound = 0
    for seed in range(6):
        batch = wide_batch(seed)
        found = weights(name, poisoned(batch, seed), **options)
        mask, old, mu = (batch[key].tolist() for key in ("policy_mask", "old_logp", "rollout_logp"))
        logs = [[o - m for o, m in zip(*row, strict=True)] for row in zip(old, mu, strict=True)]
        rule = RULES[name, above_cap]
        if level == "token":
            rows = zip(logs, mask, strict=True)
            expected: Any = [[rule(math.exp(v)) if m else 0.0 for v, m in zip(*row, strict=True)] for row in rows]
        else:
            sums = [math.fsum(v for v, m in zip(*row, strict=True) if m) for row in zip(logs, mask, strict=True)]
            expected = [rule(math.exp(max(-20.0, min(20.0, total)))) for total in sums]
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
        bound += int((found == torch.tensor(rule(math.inf))).sum())
    assert bound > 0


def test_mis_bounds_the_geometric_mean_of_long_sequences_whatever_their_length():
    for length in (1, 7, 400):
        mask, old = torch.ones(3, length + 2).double(), torch.zeros(3, length + 2).double()
        mask[:, length:] = 0
        rollout = torch.tensor([[-0.009], [-0.02], [0.02]], dtype=torch.float64).expand_as(old).clone()
        rollout[:, length:] = math.nan
        assert corrections.mis(old, rollout, mask, geometric=True).tolist() == [1, 0, 0]
        assert corrections.mis(old, rollout, mask, 0.97, 1.03, geometric=True).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="geometric mean is of a sequence"):
        corrections.mis(old, rollout, mask, geometric=True, level="token")


def test_bounds_are_inclusive_and_a_row_without_policy_tokens_is_kept():
    old = torch.zeros(3, 1).double()
    mask = torch.tensor([[1.0], [1.0], [0.0]])
    halves = torch.tensor([[0.0], [0.0], [9.0]]).double()
    assert corrections.mis(old, halves, mask, 1.0, 1.0).tolist() == [1, 1, 1]
    assert corrections.icepop(old, halves, mask, 1.0, 1.0).tolist() == [[1], [1], [0]]
    assert corrections.icepop(old, halves, mask, 1.0 + 1e-9, 2.0).tolist() == [[0], [0], [0]]


def test_what_the_engine_held_for_impossible_is_bounded_or_dropped():
    old, rollout = torch.zeros(1, 2), torch.tensor([[-math.inf, 0.0]])
    for name, expected in (("tis", 2.0), ("decoupled", 5.0), ("icepop", 0.0)):
        assert getattr(corrections, name)(old, rollout, torch.ones(1, 2)).tolist() == [[expected, 1.0]]
    assert corrections.mis(old, rollout, torch.ones(1, 2)).item() == 0


def test_sums_of_logs_are_clamped_before_the_exponential():
    old, mask = torch.zeros(2, 300), torch.ones(2, 300)
    rollout = torch.tensor([[-1.0], [1.0]]).expand(2, 300)
    found = corrections.tis(old, rollout, mask, 1e30, "sequence")
    np.testing.assert_allclose(found, [math.exp(20), math.exp(-20)], rtol=1e-6)


@pytest.mark.parametrize("name", ["tis", "icepop", "mis", "decoupled"])
def test_weights_are_detached_and_unknown_levels_refused(name):
    batch = wide_batch(0)
    batch["old_logp"].requires_grad_()
    for level in ("token", "sequence"):
        assert not weights(name, batch, level=level).requires_grad
    with pytest.raises(ValueError, match=f"{name}: unknown level 'word'"):
        weights(name, batch, level="word")


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["tis", "icepop", "mis", "decoupled"])
def test_a_nan_of_the_engine_at_a_policy_token_surfaces(name, level):
    batch = wide_batch(1)
    batch["rollout_logp"][2, 0] = math.nan
    assert torch.isnan(weights(name, batch, level=level)[2]).any()


def test_what_is_dropped_still_counts_in_the_denominator():
    batch = wide_batch(2)
    weight = weights("icepop", batch)
    loss = policy_losses.token(**{k: v for k, v in batch.items() if k != "turn_ids"}).token_loss * weight
    kept = batch["loss_mask"] > 0
    expected = loss[kept].sum() / kept.sum()
    assert (weight[kept] == 0).any()
    torch.testing.assert_close(aggregate(loss, batch["loss_mask"], "token_mean"), expected)


def test_token_loss_times_decoupled_is_areals_objective():
    """w · min(rA, clip(r)A) with r = π_θ/π_prox and w = π_prox/μ."""
    batch = wide_batch(3)
    found = policy_losses.token(**{k: v for k, v in batch.items() if k != "turn_ids"}).token_loss
    found = found * weights("decoupled", batch)
    for i, t in zip(*np.nonzero(batch["loss_mask"].numpy()), strict=True):
        theta, prox, mu = (float(batch[key][i, t].exp()) for key in ("logp", "old_logp", "rollout_logp"))
        expected = min(5.0, prox / mu) * clipped_loss(theta / prox, float(batch["advantages"][i, t]), 0.2, 0.2)
        assert found[i, t].item() == pytest.approx(expected, rel=1e-12)


def test_decoupled_refuses_an_unknown_way_with_what_exceeds_the_cap():
    with pytest.raises(ValueError, match="unknown above_cap 'clip'"):
        weights("decoupled", wide_batch(0), above_cap="clip")


@pytest.mark.parametrize("name", ["tis", "icepop", "mis", "decoupled"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), pad=st.integers(0, 3), level=st.sampled_from(["token", "sequence"]))
def test_padding_row_order_and_tool_tokens_change_no_weight(name, seed, pad, level):
    batch = wide_batch(seed)
    plain = weights(name, batch, level=level)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    fills = {"policy_mask": 0.0, "loss_mask": 0.0, "turn_ids": -1.0}
    changed = {
        key: torch.nn.functional.pad(value[order], (0, pad), value=fills.get(key, math.inf))
        for key, value in poisoned(batch, seed).items()
    }
    found = weights(name, changed, level=level)
    expected = plain[order]
    if level == "token":
        expected = torch.nn.functional.pad(expected, (0, pad))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
