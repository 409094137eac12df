"""`parse_failure`: a penalty for each piece of text that meant to be a call and is none."""

from __future__ import annotations

from toolrl.rewards.component import RewardContext, rewards
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory


@rewards.register("parse_failure")
def parse_failure(trajectory: Trajectory, task: Task, context: RewardContext, *, penalty: float = 0.1) -> list[float]:
    """−penalty for every call of a turn that the parser could not read.

    `format` counts a turn once, however many of its calls are broken, and arguments that do not fit too; take one of them.
    A call that the length limit cut off is not counted: the outcome says `length`.
    """
    return [
        -penalty * max(0, len(turn.call_errors) - (turn.finish_reason == "length")) for turn in trajectory.policy_turns
    ]
