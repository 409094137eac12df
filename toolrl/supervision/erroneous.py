"""Tasks whose samples all failed (`erroneous`): ETS of arXiv 2606.26027.

Such a group has no spread, so its advantages are 0 and reinforcement learning gets nothing from it. In its place the task's
reference y* is learnt:  L = −Σ log π_θ(y*_t | x, y*_<t) / number of tokens, over the policy tokens of all such references.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolrl.algorithms.groups import counts
from toolrl.supervision.guidance import guided_by
from toolrl.supervision.references import solved
from toolrl.trajectory import Trajectory


def failed_groups(groups: Sequence[Sequence[Trajectory]], *, full_outcome: float = 1.0) -> list[Sequence[Trajectory]]:
    """The groups in which the policy has sampled something that counts, and nothing of it is right.

    A reference in the group is no sample; a sample after a hint is one. A group with a sample whose reward `outcome` is not
    there yet is not known to have failed.

    Args:
        full_outcome: the reward `outcome` of a right answer, weighted.
    """
    return [group for group in groups if _failed(group, full_outcome)]


def _failed(group: Sequence[Trajectory], full_outcome: float) -> bool:
    samples = [member for member in group if counts(member) and guided_by(member) != "reference"]
    known = all("outcome" in member.rewards for member in samples)
    return bool(samples) and known and not any(solved(member, full_outcome=full_outcome) for member in samples)
