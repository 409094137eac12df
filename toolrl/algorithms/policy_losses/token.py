"""The clipped token ratio of PPO, GRPO and DAPO: L = −min(rA, clip(r, 1−ε_l, 1+ε_h)A) with r = exp(logp − old_logp)."""

from __future__ import annotations

import torch

from toolrl.algorithms.diagnostics import PolicyLoss, policy_loss
from toolrl.algorithms.masks import inside, loss_mask_of, per_token
from toolrl.algorithms.registries import policy_loss_registry


@policy_loss_registry.register("token")
def token(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    policy_mask: torch.Tensor,
    loss_mask: torch.Tensor | None = None,
    *,
    rollout_logp: torch.Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Token losses [B, T] (Schulman et al. 2017; DAPO: clip .2/.28; dual clip: Ye et al. 2020).

    Args:
        logp, old_logp: [B, T]; the gradient flows through `logp`.
        advantages: [B, T] or [B].
        policy_mask, loss_mask: [B, T]; the loss mask is a subset of the policy mask (None: equal).
        rollout_logp: not used here.
        dual_clip: c > 1; for A < 0 the loss is at most −cA. None: off; 3 is usual.
    """
    keep = loss_mask_of(policy_mask, loss_mask)
    ratio = torch.exp(inside(logp, keep) - inside(old_logp, keep).detach())
    advantage = inside(per_token(advantages, ratio), keep).detach()
    plain = -advantage * ratio
    bounded = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = bounded > plain  # False for NaN, which so surfaces from `plain`
    loss = torch.where(clipped, bounded, plain)
    if dual_clip:
        ceiling = -advantage * dual_clip
        over = (advantage < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        clipped = clipped | over
    return policy_loss(inside(loss, keep), ratio, clipped, policy_mask, keep)
