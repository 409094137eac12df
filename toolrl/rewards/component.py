"""What a reward component is: a function of one finished trajectory and its task.

It returns one number for the whole trajectory, or one for each policy turn; the pipeline weighs and records them. It
may be async; one whose number comes later from somewhere else returns `Pending()`. Its keyword arguments after the
first three are its options in the config.

A component that needs more than the trajectory says so with `scored_at` below `register`; the pipeline leaves it to who
has the rest.

What a tool printed is nobody's merit: a result's text is read only to find what the policy wrote of it later
(`provenance`), and whether a repeated call gave anything else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from toolrl.registry import Registry
from toolrl.reward_records import FULL_SCORE, Score
from toolrl.tasks import AnswerChecker, Task
from toolrl.trajectory import Outcome, ToolResult, Trajectory, Turn


@dataclass(frozen=True)
class Pending:
    """What a component returns whose reward is delivered later, under its name and the trajectory's `reward_id`."""


Component = Callable[..., Score | Pending | Awaitable[Score | Pending]]  # (trajectory, task, context, **options)

rewards: Registry[Component] = Registry("reward")

# When a component is scored: at the episode's end, when its whole group is there, or when the learner can be asked.
Stage = Literal["episode", "group", "learner"]
_Scored = TypeVar("_Scored", bound=Callable[..., Any])


def scored_at(stage: Stage) -> Callable[[_Scored], _Scored]:
    """Marks a component that is not scored at the episode's end; written below `register`. Its arguments before the
    options are then those that this stage gives."""

    def mark(component: _Scored) -> _Scored:
        component.stage = stage  # type: ignore[attr-defined]
        return component

    return mark


def stage_of(component: Callable[..., Any]) -> Stage:
    """What `scored_at` says of a component."""
    found: Stage = getattr(component, "stage", "episode")
    return found


@dataclass
class RewardContext:
    """What the components of one trajectory share."""

    checker: AnswerChecker
    _outcome: float | None = field(default=None, init=False, repr=False)

    async def outcome(self, trajectory: Trajectory, task: Task) -> float:
        """The verifier's score of the trajectory's answer, 0 to 1; 0 where the episode ended in anything but an answer.

        The verifier is asked once, however many components want to know. Raises VerifierFailed.
        """
        if trajectory.outcome is not Outcome.ANSWERED:
            return 0.0
        if self._outcome is None:
            self._outcome = await self.checker.check(task, trajectory.answer)
        return self._outcome

    async def is_right(self, trajectory: Trajectory, task: Task) -> bool:
        """Whether the answer has the verifier's full score. Raises VerifierFailed."""
        return await self.outcome(trajectory, task) >= FULL_SCORE


def calls_and_results(trajectory: Trajectory) -> list[tuple[Turn, list[ToolResult]]]:
    """[n_policy_turns] each policy turn with the results of its calls, whenever they came."""
    return list(zip(trajectory.policy_turns, trajectory.results_of_turns(), strict=True))
