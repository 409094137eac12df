"""Where each kind of algorithm is found by name (or by import path, for a user's own).

What a registered function takes and returns, by kind:
- advantage: `(group: list[Trajectory], **options) -> list[list[float]]`, one list a trajectory, one number a policy
  turn. The group holds only members that count (see `groups.group_advantages`).
- advantage that needs evidence from the learner (`@needs(…)`): `(batch: list[Trajectory], evidence: list[list],
  **options) -> list[list[float]]` over the whole batch, members that count only; see `needs`.
- policy loss: `(logp, old_logp, advantages, policy_mask, loss_mask=None, *, rollout_logp=None, **options) ->
  PolicyLoss`; one that also has the keyword `turn_ids` [B, T] is given it (-1 for tool tokens).
- correction: `(old_logp, rollout_logp, policy_mask, **options) -> [B, T] or [B]` weights, detached.
- regulariser: `(LossInputs, **options) -> Term`, a token loss with its own normaliser (see `regularizers.terms`).
- embedder: `(text) -> sequence of floats`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from toolrl.registry import Registry

advantage_registry: Registry[Callable[..., list[list[float]]]] = Registry("advantage")
policy_loss_registry: Registry[Callable[..., Any]] = Registry("policy loss")
correction_registry: Registry[Callable[..., Any]] = Registry("correction")
regularizer_registry: Registry[Callable[..., Any]] = Registry("regulariser")
embedder_registry: Registry[Callable[[str], Sequence[float]]] = Registry("code embedder")

Evidence = Literal["values", "teacher"]
Advantage = TypeVar("Advantage", bound=Callable[..., list[list[float]]])


def needs(
    evidence: Evidence, *, per_token: bool = False, targets: Callable[..., list[list[float]]] | None = None
) -> Callable[[Advantage], Advantage]:
    """Marks an advantage that works on the whole batch and on evidence of the learner's; written below `register`.

    Args:
        evidence: what `evidence[i]` holds for trajectory i. `values`: one V a policy turn, read at the last token before
            the turn's first action token. `teacher`: one triple a policy token (log-probability under the policy
            conditioned on the answer, log-probability under the policy, entropy in nats).
        per_token: the result holds one number a policy token, not one a policy turn.
        targets: for `values`: what the critic is trained towards, called as the advantage is (same options), one number
            a policy turn.
    """

    def mark(function: Advantage) -> Advantage:
        function.needs = evidence  # type: ignore[attr-defined]
        function.per_token = per_token  # type: ignore[attr-defined]
        function.targets = targets  # type: ignore[attr-defined]
        return function

    return mark


def needed_evidence(advantage: Callable[..., Any]) -> Evidence | None:
    """What `needs` says of an advantage; None: it works on groups, without evidence."""
    found: Evidence | None = getattr(advantage, "needs", None)
    return found


def is_per_token(advantage: Callable[..., Any]) -> bool:
    """Whether an advantage gives one number a policy token instead of one a policy turn."""
    return bool(getattr(advantage, "per_token", False))


def value_targets(advantage: Callable[..., Any]) -> Callable[..., list[list[float]]] | None:
    """The critic's targets that go with an advantage, see `needs`."""
    found: Callable[..., list[list[float]]] | None = getattr(advantage, "targets", None)
    return found
