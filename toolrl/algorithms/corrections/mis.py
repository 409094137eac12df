"""MIS, masked importance sampling (Liu et al. 2025): drop what the engine and the trainer disagree on, keep the rest as it is.

    sequence level: 1[low ≤ ∏_t k_t ≤ high], or of the geometric mean (∏_t k_t)^{1/T}, T = policy tokens
    token level:    1[low ≤ k_t ≤ high]

k = π_old/μ, see `engine_gap`. 0 or 1, detached, multiplied onto the token loss, never renormalised by what was kept.
Defaults: [.5, 2]; for the geometric mean [.99, 1.01].

Traps. A product's bounds mean less the longer the trajectory, a geometric mean's do not: prefer it for long ones, and do not
give it the product's bounds. What is kept is not reweighted: the gap that is left stays in the gradient.
"""

from __future__ import annotations

import torch

from toolrl.algorithms.corrections.engine_gap import Level, gap_ratio, within
from toolrl.algorithms.masks import inside
from toolrl.algorithms.registries import correction_registry

BOUNDS = {False: (0.5, 2.0), True: (0.99, 1.01)}  # by `geometric`


@correction_registry.register("mis")
def mis(
    old_logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    policy_mask: torch.Tensor,
    low: float | None = None,
    high: float | None = None,
    geometric: bool = False,
    level: Level = "sequence",
) -> torch.Tensor:
    """Weights of 0 and 1: [B] at sequence level, [B, T] (0 outside the policy mask) at token level.

    Args:
        old_logp, rollout_logp, policy_mask: [B, T].
        low, high: inclusive bounds; None: the module's defaults.
        geometric: bound the geometric mean instead of the product; of a sequence only.
        level: `sequence` or `token`.
    """
    ratio = gap_ratio("mis", old_logp, rollout_logp, policy_mask, level, geometric=geometric)
    lower, upper = BOUNDS[geometric]
    kept = within(ratio, lower if low is None else low, upper if high is None else high)
    weight = torch.where(torch.isnan(ratio), ratio, kept.to(ratio.dtype))
    return inside(weight, policy_mask) if level == "token" else weight
