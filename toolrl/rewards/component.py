"""What a reward component is: a function of one finished trajectory and its task.

It returns one number for the whole trajectory, or one for each policy turn; the pipeline weighs and records them. It
may be async. Its keyword arguments after the first three are its options in the config. It reads policy turns and the
status of results, never the text of a result: what a tool printed is nobody's merit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from toolrl.registry import Registry
from toolrl.tasks import AnswerChecker
from toolrl.trajectory import ToolResult, Trajectory, Turn

Score = float | list[float]  # of the trajectory, or [n_policy_turns]
Component = Callable[..., Score | Awaitable[Score]]  # (trajectory, task, context, **options)

rewards: Registry[Component] = Registry("reward")


@dataclass(frozen=True)
class RewardContext:
    """What components share."""

    checker: AnswerChecker


def calls_and_results(trajectory: Trajectory) -> list[tuple[Turn, list[ToolResult]]]:
    """[n_policy_turns] each policy turn with the results of its calls: those before the next policy turn."""
    pairs: list[tuple[Turn, list[ToolResult]]] = []
    for turn in trajectory.turns:
        if turn.kind == "policy":
            pairs.append((turn, []))
        elif pairs:
            pairs[-1][1].extend(turn.results)
    return pairs
