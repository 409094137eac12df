"""`call_success`: a bonus for calls that were carried out and were of use, where the answer is right."""

from __future__ import annotations

from toolrl.rewards.component import RewardContext, rewards
from toolrl.rewards.provenance import uses_of_calls
from toolrl.rewards.result_use import known_texts
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory


@rewards.register("call_success")
async def call_success(
    trajectory: Trajectory, task: Task, context: RewardContext, *, bonus: float = 0.1
) -> list[float]:
    """bonus × (calls of the turn that succeeded) / (calls that the trajectory asked for), where the answer is right.

    A call succeeded when it came back `ok` and something of its result was used (`provenance`): a bonus for coming back
    alone would pay for `print(1)`. Those that failed, were cut off or could not be read stand in the denominator, so the
    whole trajectory earns at most `bonus`, with however many calls.
    """
    turns = trajectory.policy_turns
    asked = sum(len(turn.calls) + len(turn.call_errors) for turn in turns)
    scores = [0.0] * len(turns)
    if asked and await context.is_right(trajectory, task):
        for each in uses_of_calls(trajectory, known_texts(task)):
            scores[each.turn] += bonus * (each.use > 0) / asked
    return scores
