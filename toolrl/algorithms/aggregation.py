"""From token losses to one number.

- `token_mean`: Σ loss·m / Σ m over the whole global batch.
- `seq_mean_token_mean`: mean over trajectories of Σ_t loss·m / Σ_t m (trajectories without a masked token do not
  count).
- `seq_mean_token_sum_norm`: Σ loss·m / constant (Dr. GRPO).

A learner with several ranks or micro-batches passes the global `denominator`: the global token count for `token_mean`,
the global trajectory count for `seq_mean_token_mean`; then the parts' losses add up to the whole's. `token_weights` is
the same rule as weights on tokens, for callers that know all masks before the first forward pass.
"""

from __future__ import annotations

import torch

from toolrl.algorithms.masks import inside

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")


def token_weights(mask: torch.Tensor, how: str, *, denominator: float | torch.Tensor | None = None) -> torch.Tensor:
    """[B, T] float32 (float64 for a float64 mask) weights w with aggregate = Σ w·loss; 0 outside the mask.

    Args:
        mask: [B, T], not 0 where a token counts.
        how: one of `AGGREGATIONS`.
        denominator: the global normaliser, see the module; None: this batch's own (for `seq_mean_token_sum_norm`: B·T).
    """
    weights = mask.bool().to(torch.float64 if mask.dtype == torch.float64 else torch.float32)
    if how == "token_mean":
        total = weights.sum() if denominator is None else denominator
    elif how == "seq_mean_token_mean":
        per_row = weights.sum(-1, keepdim=True)
        total = (per_row > 0).sum() if denominator is None else denominator
        weights = weights / per_row.clamp(min=1)
    elif how == "seq_mean_token_sum_norm":
        total = mask.numel() if denominator is None else denominator
    else:
        raise ValueError(f"unknown aggregation {how!r}; known: {', '.join(AGGREGATIONS)}")
    return weights / torch.as_tensor(total, dtype=weights.dtype, device=weights.device).clamp(min=1e-12)


def aggregate(
    token_loss: torch.Tensor, mask: torch.Tensor, how: str, *, denominator: float | torch.Tensor | None = None
) -> torch.Tensor:
    """The loss as a 0-dim tensor: `token_loss` [B, T] over `mask` [B, T] in the way of `how` (see the module)."""
    weights = token_weights(mask, how, denominator=denominator).to(token_loss.dtype)
    return (inside(token_loss, mask) * weights).sum()
