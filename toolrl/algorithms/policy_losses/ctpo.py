"""CTPO (arXiv 2605.07331): the cumulative token ratio, with bounds in log space that widen with the position.

    ℓ_t = Σ_{k≤t} policy_mask_k · clamp(δ_k, −20, 20)      δ = logp − old_logp
    τ_t = Σ_{k≤t} policy_mask_k                            policy tokens only, over all turns, no reset
    s_t = max(τ_t, 1)^p
    log ρ_t = min(sg[ℓ_t] + logp_t − sg[logp_t], 10)       the gradient at t is ρ_t·∇logp_t; none flows through the sum
    L1 = −Aρ;  L2 = −A·exp(clamp(log ρ, −ε_low·s, +ε_high·s));  L = max(L1, L2)
    dual clip: for A < 0, L = min(L, −A·e^{c·s})

Defaults: ε .025/.05 in log space (bounds at τ = 1: [.9753, 1.0513], 100: [.779, 1.649], 1000: [.454, 4.86]), p = .5, dual clip
c = .05; `token_mean` (the paper: `seq_mean_token_mean`). Authors: lr 1e-6, 16 updates a batch.

Traps. The denominator is π_old, never π_ref: against π_ref the product drifts for the whole run and clips everything. Where
old_logp are the weights at the batch's first update, as in our learner, ρ ≡ 1 there: the method acts from the second on.
A token that leaves the loss (`loss_mask` 0) stays in the sum of the tokens after it.
"""

from __future__ import annotations

from typing import Literal

import torch

from toolrl.algorithms.diagnostics import PolicyLoss, policy_loss
from toolrl.algorithms.masks import inside, loss_mask_of, per_token, positions
from toolrl.algorithms.policy_losses.clipping import clipped_loss, dual_clipped
from toolrl.algorithms.registries import policy_loss_registry

LOG_STEP_BOUND = 20.0
LOG_RATIO_BOUND = 10.0
DUAL_CLIP = 0.05
DEFAULT_CLIPS = {"log": (0.025, 0.05), "ratio": (0.2, 0.2)}


@policy_loss_registry.register("ctpo")
def ctpo(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    policy_mask: torch.Tensor,
    loss_mask: torch.Tensor | None = None,
    *,
    rollout_logp: torch.Tensor | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | bool | None = DUAL_CLIP,
    power: float = 0.5,
    space: Literal["log", "ratio"] = "log",
) -> PolicyLoss:
    """Token losses [B, T]; formula and traps in the module.

    Args:
        logp, old_logp: [B, T]; the gradient flows through `logp` only.
        advantages: [B, T] or [B].
        policy_mask, loss_mask: [B, T]; the loss mask is a subset of the policy mask (None: equal).
        rollout_logp: not used here.
        clip_low, clip_high: None: .025/.05 in log space, .2/.2 in ratio space.
        dual_clip: c; None or False: off, True: .05. The ceiling is −A·e^{c·s} in both spaces.
        power: p of s_t; 0 gives uniform bounds, −.5 those of the geometric mean.
        space: `log`, or `ratio`: ρ clipped to [1 − ε_low, 1 + ε_high] at every position (the plain cumulative variant).
    """
    if space not in DEFAULT_CLIPS:
        raise ValueError(f"ctpo: unknown space {space!r}; known: log, ratio")
    low = DEFAULT_CLIPS[space][0] if clip_low is None else clip_low
    high = DEFAULT_CLIPS[space][1] if clip_high is None else clip_high
    dual = DUAL_CLIP if dual_clip is True else dual_clip

    keep = loss_mask_of(policy_mask, loss_mask)
    log_ratio, scale = cumulative(logp, old_logp, policy_mask, power)
    live = inside(logp, keep)
    log_ratio = (log_ratio + live - live.detach()).clamp(max=LOG_RATIO_BOUND)
    advantage = inside(per_token(advantages, log_ratio), keep).detach()
    ratio = torch.exp(log_ratio)
    if space == "log":
        bounded_ratio = torch.exp(torch.clamp(log_ratio, min=-low * scale, max=high * scale))
    else:
        bounded_ratio = ratio.clamp(1 - low, 1 + high)
    loss, clipped = clipped_loss(advantage, ratio, bounded_ratio)
    if dual:
        loss, clipped = dual_clipped(loss, clipped, advantage, torch.exp(dual * scale))
    return policy_loss(inside(loss, keep), ratio, clipped, policy_mask, keep)


def cumulative(
    logp: torch.Tensor, old_logp: torch.Tensor, policy_mask: torch.Tensor, power: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ℓ, s), both [B, T] and detached: the sum of the clamped log-ratios of the policy's tokens and the width of the
    bounds."""
    delta = inside(logp, policy_mask).detach() - inside(old_logp, policy_mask).detach()
    log_ratio = delta.clamp(-LOG_STEP_BOUND, LOG_STEP_BOUND).cumsum(-1)
    return log_ratio, positions(policy_mask, log_ratio.dtype).clamp(min=1) ** power
