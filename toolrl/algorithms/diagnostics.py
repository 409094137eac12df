"""What the importance ratios look like: largest ratio, share of clipped tokens (overall and by position), effective
sample size.

Everything is one vector of sums, so that micro-batches and ranks combine exactly: entry 0 combines by maximum, the
others by addition. Position is a quarter of the row's own policy tokens (quarter 1: the first fourth), because a
cumulative ratio clips late tokens first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from toolrl.algorithms.masks import positions

QUARTERS = 4
N_SUMS = 5 + 2 * QUARTERS  # max, tokens, clipped, Σw, Σw², tokens by quarter, clipped by quarter


class PolicyLoss(NamedTuple):
    """`token_loss` [B, T] (0 outside the loss mask) and the diagnostics as named floats in 0-dim tensors."""

    token_loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def ratio_sums(
    ratio: torch.Tensor, clipped: torch.Tensor, policy_mask: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    """[N_SUMS] float64 sums over the tokens of `loss_mask` [B, T]; `ratio` [B, T], `clipped` [B, T] bool."""
    with torch.no_grad():
        kept = loss_mask.bool()
        weight = torch.where(kept, ratio.detach().double(), 0.0)
        position = positions(policy_mask, torch.float64)
        quarter = ((position - 1) * QUARTERS / position[:, -1:].clamp(min=1)).long().clamp(0, QUARTERS - 1)
        # One histogram gives both counts: bin = quarter, or quarter + QUARTERS where clipped.
        bins = (quarter + QUARTERS * clipped.long())[kept]
        counts = torch.bincount(bins, minlength=2 * QUARTERS).double().view(2, QUARTERS)
        by_quarter, clipped_by_quarter = counts.sum(0), counts[1]
        largest = weight.amax() if weight.numel() else weight.new_zeros(())
        head = torch.stack([largest, counts.sum(), counts[1].sum(), weight.sum(), weight.square().sum()])
        return torch.cat([head, by_quarter, clipped_by_quarter])


def combine(sums: list[torch.Tensor]) -> torch.Tensor:
    """[N_SUMS] of several micro-batches as of one."""
    stacked = torch.stack(sums)
    total = stacked.sum(0)
    total[0] = stacked[:, 0].amax()
    return total


def ratio_metrics(sums: torch.Tensor) -> dict[str, torch.Tensor]:
    """Named diagnostics from [N_SUMS]: `ratio/max`, `ratio/clip_fraction`, `ratio/clip_fraction_q1..4`, `ratio/ess`
    (share of tokens)."""
    tokens = sums[1].clamp(min=1)
    by_quarter, clipped_by_quarter = sums[5 : 5 + QUARTERS], sums[5 + QUARTERS :]
    shares = clipped_by_quarter / by_quarter.clamp(min=1)
    metrics = {
        "ratio/max": sums[0],
        "ratio/clip_fraction": sums[2] / tokens,
        "ratio/ess": sums[3].square() / (tokens * sums[4]).clamp(min=torch.finfo(torch.float64).tiny),
    }
    metrics.update({f"ratio/clip_fraction_q{index + 1}": share for index, share in enumerate(shares.unbind())})
    return metrics


def policy_loss(
    token_loss: torch.Tensor,
    ratio: torch.Tensor,
    clipped: torch.Tensor,
    policy_mask: torch.Tensor,
    loss_mask: torch.Tensor,
) -> PolicyLoss:
    """The result of a policy loss; its `metrics` also hold the raw `sums`, from which a learner combines
    micro-batches."""
    sums = ratio_sums(ratio, clipped, policy_mask, loss_mask)
    return PolicyLoss(token_loss, {**ratio_metrics(sums), "sums": sums})
