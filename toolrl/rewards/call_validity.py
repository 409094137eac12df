"""`call_validity`: a penalty for calls that no tool can take, and for asking again what has been answered."""

from __future__ import annotations

import json

from toolrl.rewards.component import RewardContext, rewards
from toolrl.tasks import Task
from toolrl.trajectory import ToolCall, ToolResult, Trajectory


@rewards.register("call_validity")
def call_validity(trajectory: Trajectory, task: Task, context: RewardContext, *, penalty: float = 0.1) -> list[float]:
    """−penalty for every call of a turn that names no tool, whose arguments do not fit the tool's schema, or that repeats.

    The toolbox is the judge of the first two: their results have the status `invalid_call`. A call repeats when an
    earlier one of the trajectory had the same tool and arguments, was carried out and gave the same: to try again after a
    failure is none, nor is to look again at something that has changed. A legal call earns nothing by itself, so there is
    nothing to collect.
    """
    results = {result.call_id: result for of_turn in trajectory.results_of_turns() for result in of_turn}
    answered: set[tuple[str, str]] = set()
    scores = []
    for turn in trajectory.policy_turns:
        wrong = 0
        for call in turn.calls:
            result = results.get(call.id)
            if result is None:
                continue  # it was not carried out, or its result never came
            key = (identity(call), came_to(result))
            wrong += result.status == "invalid_call" or key in answered
            if result.status == "ok":
                answered.add(key)
        scores.append(-penalty * wrong)
    return scores


def identity(call: ToolCall) -> str:
    """The same for calls that ask for the same."""
    return json.dumps([call.name, call.arguments], sort_keys=True, default=str)


def came_to(result: ToolResult) -> str:
    """What a call gave, without its id, which a late result's text holds."""
    return f"{result.status} {result.text.replace(result.call_id, '')}"
