"""`result_use`: a bonus for what the policy made of its tools' results, where the answer is right."""

from __future__ import annotations

from toolrl.rewards.component import RewardContext, rewards
from toolrl.rewards.provenance import uses_of_calls
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory


@rewards.register("result_use")
async def result_use(
    trajectory: Trajectory, task: Task, context: RewardContext, *, bonus: float = 0.1, only_when_right: bool = True
) -> list[float]:
    """bonus × the mean over the calls that came back of how much of each result was used, on the turns that called.

    See `provenance` for what is a use. It is a mean, so the whole trajectory earns at most `bonus`, and calls that give
    nothing lessen it. Of a page of text little is used, so this is for tools that compute.

    Args:
        only_when_right: false pays for use under a wrong answer too, which a policy can collect by reading aloud whatever
            a tool says.
    """
    scores = [0.0] * len(trajectory.policy_turns)
    uses = uses_of_calls(trajectory, known_texts(task))
    if any(each.use for each in uses) and (not only_when_right or await context.is_right(trajectory, task)):
        for each in uses:
            scores[each.turn] += bonus * each.use / len(uses)
    return scores


def known_texts(task: Task) -> list[str]:
    """What stands in the prompt."""
    return [str(message["content"]) for message in task.messages]
