"""What the importance ratios look like: largest ratio, share of clipped tokens (overall and by position), mean ratio by
position, effective sample size.

Everything is one vector of sums, so that micro-batches and ranks combine exactly: entry 0 combines by maximum, the
others by addition. A cumulative ratio clips late tokens first, so position is counted in two ways: as a quarter of the row's
own policy tokens (quarter 1: the first fourth), and by τ, the number of the policy token over all turns, in ranges: the
bounds of `ctpo` are as wide as τ says, whatever the row's length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from toolrl.algorithms.masks import positions

QUARTERS = 4
RANGES = ("1_16", "17_64", "65_256", "257_1024", "1025_on")  # of τ
_LAST_OF_RANGE = (16, 64, 256, 1024)
# max, tokens, clipped, Σw, Σw²; by quarter: tokens, clipped; by range of τ: tokens, clipped, Σw
N_SUMS = 5 + 2 * QUARTERS + 3 * len(RANGES)


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
        return torch.cat(
            [head, by_quarter, clipped_by_quarter, *_by_range(position[kept], weight[kept], clipped[kept])]
        )


def _by_range(position: torch.Tensor, weight: torch.Tensor, clipped: torch.Tensor) -> list[torch.Tensor]:
    """(tokens, clipped, Σw), [RANGES] each, of n tokens."""
    last = torch.tensor(_LAST_OF_RANGE, dtype=position.dtype, device=position.device)
    where = torch.bucketize(position, last)
    parts = (torch.ones_like(weight), clipped.to(weight.dtype), weight)
    return [torch.bincount(where, weights=part, minlength=len(RANGES)) for part in parts]


def combine(sums: list[torch.Tensor]) -> torch.Tensor:
    """[N_SUMS] of several micro-batches as of one."""
    stacked = torch.stack(sums)
    total = stacked.sum(0)
    total[0] = stacked[:, 0].amax()
    return total


def ratio_metrics(sums: torch.Tensor) -> dict[str, torch.Tensor]:
    """Named diagnostics from [N_SUMS]: `ratio/max`, `ratio/clip_fraction`, `ratio/clip_fraction_q1..4`, `ess` (share of
    tokens)."""
    tokens = sums[1].clamp(min=1)
    by_quarter, clipped_by_quarter = sums[5 : 5 + QUARTERS], sums[5 + QUARTERS : 5 + 2 * QUARTERS]
    shares = clipped_by_quarter / by_quarter.clamp(min=1)
    metrics = {
        "ratio/max": sums[0],
        "ratio/clip_fraction": sums[2] / tokens,
        "ess": sums[3].square() / (tokens * sums[4]).clamp(min=torch.finfo(torch.float64).tiny),
    }
    metrics.update({f"ratio/clip_fraction_q{index + 1}": share for index, share in enumerate(shares.unbind())})
    return metrics


def range_metrics(sums: torch.Tensor) -> dict[str, float]:
    """`ratio/clip/by_position/RANGE` and `ratio/mean/by_position/RANGE` from [N_SUMS], for those of `RANGES` with tokens."""
    metrics = {}
    for name, (count, clipped, weight) in zip(RANGES, sums[5 + 2 * QUARTERS :].view(3, -1).T.tolist(), strict=True):
        if count:
            metrics[f"ratio/clip/by_position/{name}"] = clipped / count
            metrics[f"ratio/mean/by_position/{name}"] = weight / count
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
