"""CPPO (arXiv 2606.10968): a trust region on probabilities, with a budget that the prefix uses up.

    D_t = |π_θ − μ|                                        probabilities of the sampled token, μ the engine's
    w_t = w_min + (1 − w_min)(T − t)/(T − 1),  Z = wD      t = 1..T counts the row's policy tokens; T = 1: w = 1
    c_t = min(δ, δ + δ_b·W_{t−1} − S_{t−1})                W, S: sums of w and Z over the policy tokens before t
    keep_t = 1 iff A(ρ_t − 1) ≤ 0 or Z_t ≤ c_t             ρ = π_θ/μ
    L_t = −A·ρ_t·keep_t

A token that moves back towards μ is always kept; one that moves away must fit what its prefix left: δ_b·W_{t−1} is what the
prefix may have used, S_{t−1} what it did. Defaults: δ = .15, w_min = .8, δ_b = clamp(P90(D), .02, .04) for each row
(percentile over its policy tokens, linear interpolation). keep, and so the budget, is a stop-gradient: the gradient at token
t is −A·ρ_t·keep_t·∇logp_t.

Traps. Region and ratio are anchored at μ, not at π_old: the gap between engine and trainer is inside ρ already, so no
correction may be multiplied on top. A token out of the loss still uses the budget.
"""

from __future__ import annotations

import torch

from toolrl.algorithms.diagnostics import PolicyLoss, policy_loss
from toolrl.algorithms.masks import inside, loss_mask_of, per_token, positions
from toolrl.algorithms.registries import policy_loss_registry

PERCENTILE = 0.9
BUDGET_BOUNDS = (0.02, 0.04)


@policy_loss_registry.register("cppo")
def cppo(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    policy_mask: torch.Tensor,
    loss_mask: torch.Tensor | None = None,
    *,
    rollout_logp: torch.Tensor | None = None,
    delta: float = 0.15,
    w_min: float = 0.8,
) -> PolicyLoss:
    """Token losses [B, T]; formula and traps in the module.

    Args:
        logp: [B, T], with gradient.
        old_logp: [B, T], stands for μ where `rollout_logp` is None (engine and trainer then agree) and is unused otherwise.
        advantages: [B, T] or [B].
        policy_mask, loss_mask: [B, T]; the loss mask is a subset of the policy mask (None: equal).
        rollout_logp: [B, T] log μ.
    """
    keep = loss_mask_of(policy_mask, loss_mask)
    behaviour = inside(old_logp if rollout_logp is None else rollout_logp, policy_mask).detach()
    divergence, excess = _over_budget(inside(logp, policy_mask).detach(), behaviour, policy_mask, delta, w_min)
    ratio = torch.exp(inside(logp, keep) - inside(behaviour, keep))
    advantage = inside(per_token(advantages, ratio), keep).detach()
    dropped = (advantage * (ratio.detach() - 1) > 0) & (excess > 0)  # False for NaN, which so surfaces
    loss = torch.where(dropped, torch.zeros_like(ratio), -advantage * ratio)
    # The budget depends on the whole row: where one of its D is NaN, no token of it is known to be kept.
    broken = torch.isnan(divergence).any(-1, keepdim=True)
    return policy_loss(inside(torch.where(broken, torch.nan, loss), keep), ratio, dropped, policy_mask, keep)


def _over_budget(
    logp: torch.Tensor, behaviour: torch.Tensor, policy_mask: torch.Tensor, delta: float, w_min: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(D, Z − c), both [B, T], 0 and −δ or less outside the mask."""
    divergence = inside((torch.exp(logp) - torch.exp(behaviour)).abs(), policy_mask)
    position = positions(policy_mask, divergence.dtype)
    length = position[:, -1:]
    weight = inside(w_min + (1 - w_min) * (length - position) / (length - 1).clamp(min=1), policy_mask)
    weight = torch.where((length == 1) & policy_mask.bool(), 1.0, weight)
    used = weight * divergence
    budget = masked_percentile(divergence, policy_mask).clamp(*BUDGET_BOUNDS)
    left = delta + budget * (weight.cumsum(-1) - weight) - (used.cumsum(-1) - used)
    return divergence, used - left.clamp(max=delta)


def masked_percentile(values: torch.Tensor, mask: torch.Tensor, share: float = PERCENTILE) -> torch.Tensor:
    """[B, 1] the percentile of each row inside the mask, interpolated linearly; 0 for a row without a masked token."""
    ordered = values.masked_fill(~mask.bool(), torch.inf).sort(-1).values
    count = mask.bool().sum(-1, keepdim=True)
    place = share * (count - 1).clamp(min=0).double()
    low, high = ordered.gather(-1, place.floor().long()), ordered.gather(-1, place.ceil().long())
    found = low + (high - low) * (place - place.floor()).to(values.dtype)
    return torch.where(count > 0, found, torch.zeros_like(found))
