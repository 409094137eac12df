"""From a recorded group to one advantage a policy turn, honouring how each episode ended.

Only trajectories whose outcome is `trained` and that acted at all enter the group's statistics; the others get 0
everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolrl.algorithms.registries import advantage_registry, needed_evidence
from toolrl.trajectory import Trajectory


def counts(trajectory: Trajectory) -> bool:
    """Whether a trajectory enters group statistics and the loss: the policy ended it, and the policy acted."""
    acted = any(turn.token_ids for turn in trajectory.policy_turns)
    return trajectory.outcome is not None and trajectory.outcome.trained and acted


def group_advantages(name: str, group: Sequence[Trajectory], **options: Any) -> list[list[float]]:
    """For each trajectory of one group, in the given order, one advantage a policy turn.

    Args:
        name: a registered advantage that works on groups (`grpo`, `gtpo`) or an import path.
        options: that advantage's own.

    Raises:
        UnknownName: no such advantage.
        ValueError: a reward of a member that counts is not finite (it names the trajectory), or the advantage needs
            evidence from the learner.
    """
    compute = advantage_registry.get(name)
    if (evidence := needed_evidence(compute)) is not None:
        raise ValueError(f"advantage {name!r} needs evidence ({evidence}) from the learner: use `batch_advantages`")
    members = [member for member in group if counts(member)]
    for member in members:
        if not abs(member.reward) < float("inf"):
            raise ValueError(f"trajectory {member.id}: reward {member.reward} is not finite; refuse it before training")
    computed = iter(compute(members, **options) if members else [])
    return [next(computed) if counts(member) else [0.0] * len(member.policy_turns) for member in group]
