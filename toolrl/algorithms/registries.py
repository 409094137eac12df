"""Where each kind of algorithm is found by name (or by import path, for a user's own).

What a registered function takes and returns, by kind:
- advantage: `(group: list[Trajectory], **options) -> list[list[float]]`, one list a trajectory, one number a policy
  turn. The group holds only members that count (see `groups.group_advantages`).
- policy loss: `(logp, old_logp, advantages, policy_mask, loss_mask=None, *, rollout_logp=None, **options) ->
  PolicyLoss`.
- correction: `(old_logp, rollout_logp, policy_mask, **options) -> [B, T] or [B]` weights, detached.
- regulariser: `(LossInputs, **options) -> Term`, a token loss with its own normaliser (see `regularizers.terms`).
- embedder: `(text) -> sequence of floats`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolrl.registry import Registry

advantage_registry: Registry[Callable[..., list[list[float]]]] = Registry("advantage")
policy_loss_registry: Registry[Callable[..., Any]] = Registry("policy loss")
correction_registry: Registry[Callable[..., Any]] = Registry("correction")
regularizer_registry: Registry[Callable[..., Any]] = Registry("regulariser")
embedder_registry: Registry[Callable[[str], Sequence[float]]] = Registry("code embedder")
