"""GSPO (arXiv 2507.18071): one ratio a trajectory, the geometric mean of its token ratios.

    s_i = exp( Σ_t policy_mask·δ_t / Σ_t policy_mask )      δ = logp − old_logp
    s_{i,t} = sg[s_i]·π_θ/sg[π_θ]                           token form (GSPO-token): gradient s_i·∇logp_t, see `geometric`
    L_t = −min(s_{i,t} A, clip(s_{i,t}, 1−ε_low, 1+ε_high) A)

Defaults: ε 3e-4/4e-4 (a mean moves far less than a token), with the aggregation `seq_mean_token_mean`: then the gradient is
that of the sequence form −min(s_i A, clip(s_i) A), averaged over trajectories.

Traps. `token_mean` weighs long trajectories more and is not the paper's. The clip takes or leaves a trajectory as a whole,
so `ratio/clip_fraction` is usually high. A tool's tokens are in no mean; a token that leaves the loss stays in it.
"""

from __future__ import annotations

import torch

from toolrl.algorithms.diagnostics import PolicyLoss
from toolrl.algorithms.policy_losses.geometric import geometric_ratio_loss
from toolrl.algorithms.registries import policy_loss_registry


@policy_loss_registry.register("gspo")
def gspo(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    policy_mask: torch.Tensor,
    loss_mask: torch.Tensor | None = None,
    *,
    rollout_logp: torch.Tensor | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PolicyLoss:
    """Token losses [B, T]; formula and traps in the module.

    Args:
        logp, old_logp: [B, T]; the gradient flows through `logp` only.
        advantages: [B, T] or [B].
        policy_mask, loss_mask: [B, T]; the loss mask is a subset of the policy mask (None: equal).
        rollout_logp: not used here.
    """
    return geometric_ratio_loss(logp, old_logp, advantages, policy_mask, loss_mask, None, clip_low, clip_high)
