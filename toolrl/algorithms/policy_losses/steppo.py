"""StepPO's policy loss (arXiv 2604.18401): one ratio a step (policy turn), the geometric mean of its token ratios.

    w_j = exp( mean_{t in turn j} δ_t )             δ = logp − old_logp, the policy's tokens of turn j
    w_{j,t} = sg[w_j]·π_θ/sg[π_θ]                   token form as in GSPO: gradient w_j·∇logp_t, see `geometric`
    L_t = −min(w_{j,t} A, clip(w_{j,t}, 1−ε_low, 1+ε_high) A)

Defaults: ε .2/.2, meant for the advantage `steppo`, which gives a turn one number.

Traps. Turns come from the recorded turns (`turn_ids`), never from runs of the mask: a tool that returns nothing would merge
two. .2 is wide for a mean over many tokens: a long turn is rarely clipped, and `ratio/clip_fraction` shows it.
"""

from __future__ import annotations

import torch

from toolrl.algorithms.diagnostics import PolicyLoss
from toolrl.algorithms.policy_losses.geometric import geometric_ratio_loss
from toolrl.algorithms.registries import policy_loss_registry


@policy_loss_registry.register("steppo")
def steppo(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    policy_mask: torch.Tensor,
    loss_mask: torch.Tensor | None = None,
    *,
    rollout_logp: torch.Tensor | None = None,
    turn_ids: torch.Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyLoss:
    """Token losses [B, T]; formula and traps in the module.

    Args:
        logp, old_logp: [B, T]; the gradient flows through `logp` only.
        advantages: [B, T] or [B].
        policy_mask, loss_mask: [B, T]; the loss mask is a subset of the policy mask (None: equal).
        rollout_logp: not used here.
        turn_ids: [B, T] which policy turn a token belongs to, from 0; any value where the policy mask is 0.

    Raises:
        ValueError: no `turn_ids`.
    """
    if turn_ids is None:
        raise ValueError("policy loss 'steppo' needs turn_ids [B, T]: its ratio is one a turn")
    return geometric_ratio_loss(logp, old_logp, advantages, policy_mask, loss_mask, turn_ids, clip_low, clip_high)
