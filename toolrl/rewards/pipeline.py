"""Runs the configured components on a finished trajectory and records what they give.

Invariants:
- All or nothing: either every component is recorded, weighted and finite, or none is and the outcome is
  `reward_missing` with the reason in `metadata["reward_missing"]`.
- A trajectory that is not trained (`infra_error`, `stale`, `cancelled`) is not scored.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
from collections.abc import Awaitable, Callable

from toolrl.config import Named, RewardConfig
from toolrl.errors import UserError
from toolrl.registry import nearest
from toolrl.rewards.component import RewardContext, Score, rewards
from toolrl.tasks import AnswerChecker, Task, VerifierFailed
from toolrl.trajectory import Outcome, Trajectory

log = logging.getLogger(__name__)

Bound = Callable[[Trajectory, Task, RewardContext], Score | Awaitable[Score]]


class RewardPipeline:
    """The rewards of a run. Raises UserError or UnknownName for a component, option or weight that cannot work."""

    def __init__(self, config: RewardConfig, checker: AnswerChecker) -> None:
        self._components: dict[str, Bound] = {}
        for part in config.components:
            name = part.name.rpartition(":")[2]
            if name in self._components:
                raise UserError(f"rewards.components names {name!r} twice")
            self._components[name] = _bound(part)
        for name, weight in config.weights.items():
            if name not in self._components:
                raise UserError(f"rewards.weights: no component {name!r}{nearest(name, list(self._components))}")
            if not math.isfinite(weight):
                raise UserError(f"rewards.weights.{name}={weight} must be finite")
        self._weights = {name: config.weights.get(name, 1.0) for name in self._components}
        self._deadline_s = config.deadline_s
        self._context = RewardContext(checker)

    async def score(self, trajectory: Trajectory, task: Task) -> None:
        """Sets the trajectory's and its turns' rewards, or the outcome `reward_missing`."""
        if trajectory.outcome is None or not trajectory.outcome.trained:
            return
        name = ""
        scores: dict[str, Score] = {}
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                for name, component in self._components.items():
                    score = component(trajectory, task, self._context)
                    score = await score if inspect.isawaitable(score) else score
                    scores[name] = _checked(score, name, len(trajectory.policy_turns))
        # A component may be a user's own: whatever it raises is its fault and takes out this one trajectory.
        except Exception as error:
            late = isinstance(error, TimeoutError) and deadline.expired()
            reason = f"later than {self._deadline_s:g} s" if late else _said(error)
            log.warning("trajectory %s has no reward: component %r: %s", trajectory.id, name, reason)
            trajectory.outcome = Outcome.REWARD_MISSING
            trajectory.metadata["reward_missing"] = f"{name}: {reason}"
            return
        for name, score in scores.items():
            self._record(trajectory, name, score)

    def _record(self, trajectory: Trajectory, name: str, score: Score) -> None:
        weight = self._weights[name]
        if isinstance(score, list):
            for turn, value in zip(trajectory.policy_turns, score, strict=True):
                turn.rewards[name] = weight * value
        else:
            trajectory.rewards[name] = weight * score


def _bound(part: Named) -> Bound:
    component = rewards.get(part.name)
    try:
        inspect.signature(component).bind(None, None, None, **part.options)
    except TypeError as error:
        known = list(inspect.signature(component).parameters)[3:]
        raise UserError(
            f"reward {part.name!r} does not take the options {dict(part.options)}: {error}; "
            f"its options: {', '.join(known) or 'none'}"
        ) from error
    return functools.partial(component, **part.options)


def _checked(score: Score, name: str, n_turns: int) -> Score:
    """The score as floats. Raises ValueError when it is no finite number or not one a turn."""
    if isinstance(score, list):
        if len(score) != n_turns:
            raise ValueError(f"reward {name!r} gave {len(score)} numbers for {n_turns} policy turns")
        values = [float(value) for value in score]
    else:
        values = [float(score)]
    if not all(map(math.isfinite, values)):
        raise ValueError(f"reward {name!r} gave {score}; a reward must be finite")
    return values if isinstance(score, list) else values[0]


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, VerifierFailed) else f"{type(error).__name__}: {error}"
