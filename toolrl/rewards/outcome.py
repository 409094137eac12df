"""`outcome`: what the task's verifier says about the final answer, from 0 to 1."""

from __future__ import annotations

from toolrl.rewards.component import RewardContext, rewards
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory


@rewards.register("outcome")
async def outcome(trajectory: Trajectory, task: Task, context: RewardContext, *, partial_credit: bool = True) -> float:
    """The score of the answer; 0 where the episode ended in anything but an answer.

    Args:
        partial_credit: keep a verifier's scores between 0 and 1; otherwise they count as 0.
    """
    score = await context.outcome(trajectory, task)
    return score if partial_credit or score >= 1.0 else 0.0
