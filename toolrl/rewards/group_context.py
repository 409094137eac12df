"""What a reward is given that is scored when its whole group is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolrl.reward_records import FULL_SCORE
from toolrl.trajectory import Trajectory


@dataclass(frozen=True)
class GroupContext:
    """Reads what was recorded before."""

    weights: Mapping[str, float]  # that the recorded rewards were weighted with

    def score(self, trajectory: Trajectory, name: str) -> float:
        """What the component `name` gave the trajectory, its turns' added up, before it was weighted; 0 without it."""
        weight = self.weights.get(name, 1.0)
        recorded = trajectory.rewards.get(name, 0.0)
        recorded += sum(turn.rewards.get(name, 0.0) for turn in trajectory.policy_turns)
        return recorded / weight if weight else 0.0

    def right(self, group: Sequence[Trajectory], name: str) -> list[bool]:
        """[n] who has the right answer by the component `name`; a partial credit is none."""
        return [self.score(member, name) >= FULL_SCORE for member in group]
