"""What a regulariser sees of a micro-batch, and what it hands back.

A regulariser is a token loss plus the name of its normaliser, so that the learner can divide by a *global* count:
`aggregation` (as the policy loss), `policy_tokens`, `preserved_tokens` (policy tokens with A ≥ 0) or `supervised_tokens`
(loss tokens with A > 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Normalizer = Literal["aggregation", "policy_tokens", "preserved_tokens", "supervised_tokens"]


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro-batch, all tensors [B, T]: one row a trajectory, T over its response positions."""

    logp: torch.Tensor  # with gradient
    entropy: torch.Tensor  # nats, with gradient where a term needs it
    old_logp: torch.Tensor
    rollout_logp: torch.Tensor
    advantages: torch.Tensor
    policy_mask: torch.Tensor
    loss_mask: torch.Tensor
    turn_ids: torch.Tensor  # -1 for tool tokens
    ref_logp: torch.Tensor | None = None
    valid_calls: float = 0.0  # mean valid tool calls a trajectory, over the whole update


@dataclass(frozen=True, slots=True)
class Term:
    """`token_loss` [B, T], 0 where it does not apply; its sum is divided as `normalizer` says."""

    token_loss: torch.Tensor
    normalizer: Normalizer = "aggregation"
