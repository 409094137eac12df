"""CISPO (MiniMax-M1, arXiv 2506.13585): the importance weight is clipped, not the update; every token keeps its gradient.

    L_t = −sg[clip(r_t, 1−ε_low, 1+ε_high)]·A·logp_t          r = exp(logp − old_logp)

The gradient at token t is −clip(r_t)·A·∇logp_t, also where the clip binds. Defaults: no lower bound, ε_high = 5.

Traps. The upper bound is 1 + ε_high, 6 by default; papers that write min(r, ε_max) mean ε_high = ε_max − 1. The loss's value
is no objective (it holds logp): compare gradients and rewards, not losses. Nothing bounds the move of a token with A < 0,
so learning rates are to be small.
"""

from __future__ import annotations

import torch

from toolrl.algorithms.diagnostics import PolicyLoss, policy_loss
from toolrl.algorithms.masks import inside, loss_mask_of, per_token
from toolrl.algorithms.registries import policy_loss_registry


@policy_loss_registry.register("cispo")
def cispo(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    policy_mask: torch.Tensor,
    loss_mask: torch.Tensor | None = None,
    *,
    rollout_logp: torch.Tensor | None = None,
    clip_low: float | None = None,
    clip_high: float = 5.0,
) -> PolicyLoss:
    """Token losses [B, T]; formula and traps in the module.

    Args:
        logp, old_logp: [B, T]; the gradient flows through `logp` only.
        advantages: [B, T] or [B].
        policy_mask, loss_mask: [B, T]; the loss mask is a subset of the policy mask (None: equal).
        rollout_logp: not used here.
        clip_low: None: off.
    """
    keep = loss_mask_of(policy_mask, loss_mask)
    live = inside(logp, keep)
    ratio = torch.exp(live.detach() - inside(old_logp, keep).detach())
    weight = ratio.clamp(min=0.0 if clip_low is None else 1 - clip_low, max=1 + clip_high)
    advantage = inside(per_token(advantages, ratio), keep).detach()
    return policy_loss(inside(-weight * advantage * live, keep), ratio, weight != ratio, policy_mask, keep)
