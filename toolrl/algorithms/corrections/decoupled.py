"""The decoupled objective of AReaL (arXiv 2505.24298): clip against recent weights, correct for the ones that sampled.

    L = w · min(r A, clip(r) A)      r = π_θ/π_prox,  w = π_prox/μ

π_prox are the trainer's weights when the batch was formed: `old_logp`, recomputed. So any policy loss whose ratio is against
π_old becomes decoupled by this weight:

    token level: w_t = min(π_prox/μ, C);   sequence level: w = min(∏_t π_prox/μ, C), the sum of logs clamped to ±20 first

Detached, never renormalised. Default C = 5. `above_cap="drop"` gives what exceeds C the weight 0, as the released code does;
`truncate` (default) gives it C.

Traps. `truncate` is `tis` with another cap: name one of them. With stale data w carries the whole distance from the oldest
weights to π_prox, so bound the staleness too. Not for a loss whose ratio is against μ (`cppo`).
"""

from __future__ import annotations

from typing import Literal

import torch

from toolrl.algorithms.corrections.engine_gap import Level, gap_ratio
from toolrl.algorithms.masks import inside
from toolrl.algorithms.registries import correction_registry


@correction_registry.register("decoupled")
def decoupled(
    old_logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    policy_mask: torch.Tensor,
    cap: float = 5.0,
    level: Level = "token",
    above_cap: Literal["truncate", "drop"] = "truncate",
) -> torch.Tensor:
    """Weights [B, T] (0 outside the policy mask) at token level, [B] at sequence level.

    Args:
        old_logp, rollout_logp, policy_mask: [B, T]; `old_logp` is log π_prox.
        cap: C.
        level: `token` or `sequence`.
        above_cap: `truncate` or `drop`.
    """
    ratio = gap_ratio("decoupled", old_logp, rollout_logp, policy_mask, level)
    if above_cap == "truncate":
        weight = ratio.clamp(max=cap)
    elif above_cap == "drop":
        weight = torch.where(ratio > cap, torch.zeros_like(ratio), ratio)
    else:
        raise ValueError(f"decoupled: unknown above_cap {above_cap!r}; known: truncate, drop")
    return inside(weight, policy_mask) if level == "token" else weight
