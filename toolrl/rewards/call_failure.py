"""`call_failure`: a penalty for calls that the tool could not carry out because of what the policy asked."""

from __future__ import annotations

from toolrl.rewards.component import RewardContext, calls_and_results, rewards
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory

# A broken format and a timeout have components of their own; `infra_error` is nobody's fault.
FAILURES = frozenset({"error", "oom", "output_limit", "died", "protocol_violation"})


@rewards.register("call_failure")
def call_failure(trajectory: Trajectory, task: Task, context: RewardContext, *, penalty: float = 0.1) -> list[float]:
    """−penalty for every call of a turn that failed (failures on purpose, `tools.failure_rate`, look the same)."""
    return [
        -penalty * sum(result.status in FAILURES for result in results) for _, results in calls_and_results(trajectory)
    ]
