"""`timeout`: a penalty for calls that passed their deadline (ALGORITHMS 1.4)."""

from __future__ import annotations

from toolrl.rewards.component import RewardContext, calls_and_results, rewards
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory


@rewards.register("timeout")
def timeout(trajectory: Trajectory, task: Task, context: RewardContext, *, penalty: float = 0.1) -> list[float]:
    """−penalty for every call of a turn that timed out."""
    return [
        -penalty * sum(result.status == "timeout" for result in results) for _, results in calls_and_results(trajectory)
    ]
