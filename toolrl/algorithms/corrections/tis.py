"""Truncated importance sampling: k = exp(old_logp − rollout_logp), cut at C from above.

Token level: min(k_t, C). Sequence level: min(∏_t k_t, C), the sum of logs clamped to ±20 first.
"""

from __future__ import annotations

from typing import Literal

import torch

from toolrl.algorithms.masks import inside
from toolrl.algorithms.registries import correction_registry

LOG_SUM_BOUND = 20.0


@correction_registry.register("tis")
def tis(
    old_logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    policy_mask: torch.Tensor,
    cap: float = 2.0,
    level: Literal["token", "sequence"] = "token",
) -> torch.Tensor:
    """Detached weights: [B, T] (0 outside the policy mask) at token level, [B] at sequence level.

    Defaults: cap 2 for tokens; 5 is usual for sequences. Every policy token enters the product, in the loss or not.
    """
    log_weight = inside(old_logp, policy_mask).detach() - inside(rollout_logp, policy_mask).detach()
    if level == "token":
        return inside(torch.exp(log_weight).clamp(max=cap), policy_mask)
    if level == "sequence":
        return torch.exp(log_weight.sum(-1).clamp(-LOG_SUM_BOUND, LOG_SUM_BOUND)).clamp(max=cap)
    raise ValueError(f"tis: unknown level {level!r}; known: token, sequence")
