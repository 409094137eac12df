"""What the corrections share: k, the trainer's probability of what was sampled over the engine's.

    token level:     k_t = exp(old_logp_t − rollout_logp_t)                      [B, T]
    sequence level:  exp( clamp(Σ_t log k_t, −20, 20) )                          [B]
    geometric mean:  exp( Σ_t log k_t / Σ_t policy_mask )                        [B]

Every policy token of a row enters its product, in the loss or not; detached; sums over logs in float32 or better. A NaN at
a policy token surfaces in the weight, one outside the mask does not.
"""

from __future__ import annotations

from typing import Literal

import torch

from toolrl.algorithms.masks import inside

LOG_SUM_BOUND = 20.0
Level = Literal["token", "sequence"]


def gap_ratio(
    name: str,
    old_logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    policy_mask: torch.Tensor,
    level: Level,
    *,
    geometric: bool = False,
) -> torch.Tensor:
    """k of the module: [B, T] at token level (1 outside the mask), [B] at sequence level; `geometric` means the latter's mean.

    Raises:
        ValueError: an unknown level, or a geometric mean at token level; it names the correction `name`.
    """
    log_ratio = inside(old_logp, policy_mask).detach() - inside(rollout_logp, policy_mask).detach()
    if level == "token" and not geometric:
        return torch.exp(log_ratio)
    if level != "sequence":
        hint = "; a geometric mean is of a sequence" if geometric else ""
        raise ValueError(f"{name}: unknown level {level!r}; known: token, sequence{hint}")
    if geometric:
        return torch.exp(log_ratio.sum(-1) / policy_mask.bool().sum(-1).clamp(min=1))
    return torch.exp(log_ratio.sum(-1).clamp(-LOG_SUM_BOUND, LOG_SUM_BOUND))


def within(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """bool where low ≤ ratio ≤ high, and where the ratio is NaN: that is to surface, not to be dropped."""
    return ~((ratio < low) | (ratio > high))
