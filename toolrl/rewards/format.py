"""`format`: a penalty on each policy turn that breaks the format of tool calls (ALGORITHMS 1.1)."""

from __future__ import annotations

from toolrl.rewards.component import RewardContext, calls_and_results, rewards
from toolrl.tasks import Task
from toolrl.trajectory import ToolResult, Trajectory, Turn


@rewards.register("format")
def format(
    trajectory: Trajectory,
    task: Task,
    context: RewardContext,
    *,
    penalty: float = 0.1,
    require_first_call: bool = False,
) -> list[float]:
    """−penalty for a turn with a broken call: one that does not parse, names no tool or does not fit the tool's schema.

    Args:
        require_first_call: a first turn that calls nothing counts as a break too.
    """
    broken = [breaks_format(turn, results) for turn, results in calls_and_results(trajectory)]
    if require_first_call and broken and not trajectory.policy_turns[0].calls:
        broken[0] = True
    return [-penalty if is_broken else 0.0 for is_broken in broken]


def breaks_format(turn: Turn, results: list[ToolResult]) -> bool:
    """Whether any call of the turn is broken. What the length limit cut off is not: the outcome says `length`."""
    if turn.finish_reason == "length":
        return len(turn.call_errors) > 1
    return bool(turn.call_errors) or any(result.status == "invalid_call" for result in results)
