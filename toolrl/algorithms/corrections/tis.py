"""TIS, truncated importance sampling (Yao et al. 2025; Ionides 2008): k cut at C from above.

    token level: min(k_t, C);   sequence level: min(∏_t k_t, C), the sum of logs clamped to ±20 first

k = π_old/μ, see `engine_gap`. Detached, multiplied onto the token loss, never renormalised. Defaults: C = 2 for tokens; 5 is
usual for sequences.

Traps. Truncation biases towards what the engine overrates; it bounds the variance. A product over thousands of tokens is at
one of its bounds almost always; at token level the correction is local and stays near 1.
"""

from __future__ import annotations

import torch

from toolrl.algorithms.corrections.engine_gap import Level, gap_ratio
from toolrl.algorithms.masks import inside
from toolrl.algorithms.registries import correction_registry


@correction_registry.register("tis")
def tis(
    old_logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    policy_mask: torch.Tensor,
    cap: float = 2.0,
    level: Level = "token",
) -> torch.Tensor:
    """Weights [B, T] (0 outside the policy mask) at token level, [B] at sequence level.

    Args:
        old_logp, rollout_logp, policy_mask: [B, T].
        cap: C.
        level: `token` or `sequence`.
    """
    weight = gap_ratio("tis", old_logp, rollout_logp, policy_mask, level).clamp(max=cap)
    return inside(weight, policy_mask) if level == "token" else weight
