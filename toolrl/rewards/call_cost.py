"""`call_cost`: a price per call, so that a call pays only where it helps."""

from __future__ import annotations

from toolrl.rewards.component import RewardContext, rewards
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory


@rewards.register("call_cost")
def call_cost(trajectory: Trajectory, task: Task, context: RewardContext, *, cost: float = 0.1) -> list[float]:
    """−cost for every call that a turn makes, whatever comes of it."""
    return [-cost * len(turn.calls) for turn in trajectory.policy_turns]
