"""IcePop (Ling team 2025, arXiv 2510.18855): k where it lies in [α, β], 0 elsewhere.

    token level: k_t · 1[α ≤ k_t ≤ β];   sequence level: K · 1[α ≤ K ≤ β] with K = ∏_t k_t

k = π_old/μ, see `engine_gap`. Detached, multiplied onto the token loss, never renormalised by the tokens kept. Defaults:
α = .5, β = 5.

Traps. What is dropped counts in the denominator, so many drops make the step small: watch `gap/mean`. A product over
thousands of tokens leaves [.5, 5] soon; the sequence level drops long trajectories first.
"""

from __future__ import annotations

import torch

from toolrl.algorithms.corrections.engine_gap import Level, gap_ratio, within
from toolrl.algorithms.masks import inside
from toolrl.algorithms.registries import correction_registry


@correction_registry.register("icepop")
def icepop(
    old_logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    policy_mask: torch.Tensor,
    low: float = 0.5,
    high: float = 5.0,
    level: Level = "token",
) -> torch.Tensor:
    """Weights [B, T] (0 outside the policy mask) at token level, [B] at sequence level.

    Args:
        old_logp, rollout_logp, policy_mask: [B, T].
        low, high: α and β, both inclusive.
        level: `token` or `sequence`.
    """
    ratio = gap_ratio("icepop", old_logp, rollout_logp, policy_mask, level)
    weight = torch.where(within(ratio, low, high), ratio, torch.zeros_like(ratio))
    return inside(weight, policy_mask) if level == "token" else weight
