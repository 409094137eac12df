"""What `gspo` and `steppo` share: one ratio for a span of tokens, the geometric mean of the token ratios, and its clip.

    w = exp(mean_{k in span} δ_k)                     over the policy's tokens of the span, in the loss or not
    token form: w_t = sg[w]·π_θ/sg[π_θ]               the gradient at token t is w·∇logp_t; none flows through the mean
    L_t = −min(w_t A_t, clip(w_t, 1−ε_low, 1+ε_high) A_t)

Where all tokens of a span are in the loss and share one A, the token form's gradient summed over the span equals that of
n·(−min(wA, clip(w)A)) with the gradient through the mean; where they do not, a token answers for itself only.
"""

from __future__ import annotations

import torch

from toolrl.algorithms.diagnostics import PolicyLoss, policy_loss
from toolrl.algorithms.masks import inside, loss_mask_of, per_token
from toolrl.algorithms.policy_losses.clipping import clipped_loss


def span_means(values: torch.Tensor, mask: torch.Tensor, spans: torch.Tensor | None) -> torch.Tensor:
    """[B, T] at each token the mean of `values` over the tokens of its row and span that are in `mask`; 0 outside it.

    Args:
        spans: [B, T] integers ≥ 0 inside the mask, any outside; None: a row is one span.
    """
    kept = mask.bool()
    if spans is None:
        mean = inside(values, kept).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1)
        return inside(mean.expand(kept.shape), kept)
    bins = torch.where(kept, spans.long() + 1, 0)  # bin 0 takes what is outside
    masked = inside(values, kept)
    size = (masked.shape[0], int(bins.max()) + 1 if bins.numel() else 1)
    sums = torch.zeros(size, dtype=masked.dtype, device=masked.device).scatter_add(1, bins, masked)
    counts = torch.zeros_like(sums).scatter_add(1, bins, kept.to(masked.dtype))
    return inside((sums / counts.clamp(min=1)).gather(1, bins), kept)


def geometric_ratio_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    policy_mask: torch.Tensor,
    loss_mask: torch.Tensor | None,
    spans: torch.Tensor | None,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Token losses [B, T] of the module's formula; `spans` [B, T] says which tokens of a row share a ratio (None: all)."""
    keep = loss_mask_of(policy_mask, loss_mask)
    delta = inside(logp, policy_mask).detach() - inside(old_logp, policy_mask).detach()
    live = inside(logp, keep)
    ratio = torch.exp(span_means(delta, policy_mask, spans) + live - live.detach())
    advantage = inside(per_token(advantages, ratio), keep).detach()
    loss, clipped = clipped_loss(advantage, ratio, ratio.clamp(1 - clip_low, 1 + clip_high))
    return policy_loss(inside(loss, keep), ratio, clipped, policy_mask, keep)
