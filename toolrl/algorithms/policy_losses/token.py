"""The clipped token ratio of PPO, GRPO and DAPO.

    r_t = exp(logp_t − old_logp_t);   L_t = −min(r A, clip(r, 1−ε_low, 1+ε_high) A)
    dual clip, for A < 0:  L_t = min(L_t, −c A)

Sources: Schulman et al. 2017 (arXiv 1707.06347); clip-higher: DAPO (arXiv 2503.14476); dual clip: Ye et al. 2020
(arXiv 1912.09729). Defaults: ε .2/.2, dual clip off. DAPO: .2/.28 with `token_mean`; dual clip: c = 3.

Traps. Without dual clip a token with A < 0 whose probability rose is pushed without bound. Where the clip binds the gradient
is exactly 0. On the first optimiser step of a fresh batch r is 1 and nothing is clipped.
"""

from __future__ import annotations

import torch

from toolrl.algorithms.diagnostics import PolicyLoss, policy_loss
from toolrl.algorithms.masks import inside, loss_mask_of, per_token
from toolrl.algorithms.policy_losses.clipping import clipped_loss, dual_clipped
from toolrl.algorithms.registries import policy_loss_registry

DUAL_CLIP = 3.0


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
    dual_clip: float | bool | None = None,
) -> PolicyLoss:
    """Token losses [B, T]; formula and traps in the module.

    Args:
        logp, old_logp: [B, T]; the gradient flows through `logp`.
        advantages: [B, T] or [B].
        policy_mask, loss_mask: [B, T]; the loss mask is a subset of the policy mask (None: equal).
        rollout_logp: not used here.
        dual_clip: c > 1; for A < 0 the loss is at most −cA. None or False: off, True: 3.

    Raises:
        ValueError: a dual clip of at most 1 would cut off tokens that have not moved.
    """
    ceiling_ratio = DUAL_CLIP if dual_clip is True else dual_clip or None
    if ceiling_ratio is not None and ceiling_ratio <= 1:
        raise ValueError(f"token: dual_clip={dual_clip} must be more than 1 (3 is usual), or None")
    keep = loss_mask_of(policy_mask, loss_mask)
    ratio = torch.exp(inside(logp, keep) - inside(old_logp, keep).detach())
    advantage = inside(per_token(advantages, ratio), keep).detach()
    loss, clipped = clipped_loss(advantage, ratio, ratio.clamp(1 - clip_low, 1 + clip_high))
    if ceiling_ratio is not None:
        loss, clipped = dual_clipped(loss, clipped, advantage, ceiling_ratio)
    return policy_loss(inside(loss, keep), ratio, clipped, policy_mask, keep)
