"""Which failed trajectories a critic is shown."""

from __future__ import annotations

import random
from collections.abc import Sequence

from toolrl.algorithms.groups import counts
from toolrl.supervision.guidance import guided_by
from toolrl.supervision.references import solved
from toolrl.trajectory import Trajectory


def failed_samples(
    groups: Sequence[Sequence[Trajectory]], most: int, rng: random.Random, *, full_outcome: float = 1.0
) -> list[Trajectory]:
    """At most `most` trajectories that the policy sampled and that are known to be wrong, of as many tasks: one of a
    group's failed samples, and which groups, is drawn evenly.

    Args:
        full_outcome: the reward `outcome` of a right answer, weighted.
    """
    failed = ([member for member in group if _failed(member, full_outcome)] for group in groups)
    drawn = [rng.choice(members) for members in failed if members]
    return rng.sample(drawn, min(most, len(drawn)))


def _failed(member: Trajectory, full_outcome: float) -> bool:
    known = counts(member) and "outcome" in member.rewards and guided_by(member) != "reference"
    return known and bool(member.policy_turns) and not solved(member, full_outcome=full_outcome)
