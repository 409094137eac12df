"""Advantages of a whole batch, whichever way they are computed: group by group, or at once with evidence of the learner's.

Only trajectories that count (see `groups.counts`) enter; the others get 0 everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from toolrl.algorithms.groups import counts, group_advantages
from toolrl.algorithms.registries import advantage_registry, is_per_token, needed_evidence, value_targets
from toolrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class BatchAdvantages:
    """`advantages`: one list a trajectory, groups one after the other, with one number a policy turn (or token)."""

    advantages: list[list[float]]
    per_token: bool = False
    targets: list[list[float]] | None = None  # for a critic: one number a policy turn of each trajectory that counts


def batch_advantages(
    name: str, groups: Sequence[Sequence[Trajectory]], *, evidence: Sequence[Any] | None = None, **options: Any
) -> BatchAdvantages:
    """The advantages of all groups.

    Args:
        name: a registered advantage or an import path.
        evidence: what an advantage that `needs` some is given: one entry for each trajectory that counts, in order.
        options: the advantage's own.

    Raises:
        UnknownName: no such advantage.
        ValueError: the advantage needs evidence and there is none, or not for every trajectory; a reward is not finite.
    """
    compute = advantage_registry.get(name)
    kind = needed_evidence(compute)
    if kind is None:
        return BatchAdvantages([row for group in groups for row in group_advantages(name, group, **options)])
    batch = [member for group in groups for member in group if counts(member)]
    if evidence is None or len(evidence) != len(batch):
        found = "none" if evidence is None else f"that of {len(evidence)} trajectories"
        raise ValueError(f"advantage {name!r} needs evidence ({kind}) for {len(batch)} trajectories, there is {found}")
    for member in batch:
        if not abs(member.reward) < float("inf"):
            raise ValueError(f"trajectory {member.id}: reward {member.reward} is not finite; refuse it before training")
    per_token = is_per_token(compute)
    computed = iter(compute(batch, evidence, **options) if batch else [])
    rows = list(_filled((member for group in groups for member in group), computed, per_token))
    towards = value_targets(compute)
    if kind == "values" and towards is None:
        raise ValueError(f"advantage {name!r} reads values but names no targets for the critic: @needs(…, targets=…)")
    return BatchAdvantages(rows, per_token, towards(batch, evidence, **options) if towards is not None else None)


def _filled(members: Iterator[Trajectory], computed: Iterator[list[float]], per_token: bool) -> Iterator[list[float]]:
    for member in members:
        turns = member.policy_turns
        size = sum(len(turn.token_ids) for turn in turns) if per_token else len(turns)
        yield next(computed) if counts(member) else [0.0] * size
