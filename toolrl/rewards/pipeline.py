"""Runs the configured components on a finished trajectory and records what they give.

Invariants:
- All or nothing: either every component is recorded, weighted and finite, or is to be delivered later
  (`toolrl.reward_records`), or none is and the outcome is `reward_missing` with the reason in
  `metadata["reward_missing"]`.
- A trajectory that is not trained (`infra_error`, `stale`, `cancelled`) is not scored.
- A component that is `scored_at` another stage is left to that stage.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable

from toolrl.config import RewardConfig
from toolrl.errors import UserError
from toolrl.registry import nearest
from toolrl.reward_records import Score, await_rewards, checked, record
from toolrl.rewards.binding import bound, recorded_name
from toolrl.rewards.component import Pending, RewardContext, rewards, stage_of
from toolrl.tasks import AnswerChecker, Task, VerifierFailed
from toolrl.trajectory import Outcome, Trajectory

log = logging.getLogger(__name__)

Bound = Callable[[Trajectory, Task, RewardContext], Score | Pending | Awaitable[Score | Pending]]


class RewardPipeline:
    """The rewards of a run. Raises UserError or UnknownName for a component, option or weight that cannot work."""

    def __init__(self, config: RewardConfig, checker: AnswerChecker) -> None:
        self._components: dict[str, Bound] = {}
        named: list[str] = []
        for part in config.components:
            name = recorded_name(part)
            if name in named:
                raise UserError(f"rewards.components names {name!r} twice")
            named.append(name)
            if stage_of(rewards.get(part.name)) == "episode":
                self._components[name] = bound(rewards, part, given=3)
        for name in config.late.names:
            if name in named:
                raise UserError(f"rewards.late.names: {name!r} is a component already; remove it from either")
        known = [*named, *config.late.names]
        for name, weight in config.weights.items():
            if name not in known:
                raise UserError(f"rewards.weights: no component {name!r}{nearest(name, known)}")
            if not math.isfinite(weight):
                raise UserError(f"rewards.weights.{name}={weight} must be finite")
        self._weights = {name: config.weights.get(name, 1.0) for name in known}
        self._late = list(config.late.names)
        self._deadline_s = config.deadline_s
        self._checker = checker

    async def score(self, trajectory: Trajectory, task: Task) -> None:
        """Sets the trajectory's and its turns' rewards and notes which are still to come, or sets `reward_missing`."""
        if trajectory.outcome is None or not trajectory.outcome.trained:
            return
        name = ""
        scores: dict[str, Score] = {}
        late = list(self._late)
        context = RewardContext(self._checker)
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                for name, component in self._components.items():
                    score = component(trajectory, task, context)
                    score = await score if inspect.isawaitable(score) else score
                    if isinstance(score, Pending):
                        late.append(name)
                    else:
                        scores[name] = checked(score, name, len(trajectory.policy_turns))
        # A component may be a user's own: whatever it raises is its fault and takes out this one trajectory.
        except Exception as error:
            too_slow = isinstance(error, TimeoutError) and deadline.expired()
            reason = f"later than {self._deadline_s:g} s" if too_slow else _said(error)
            log.warning("trajectory %s has no reward: component %r: %s", trajectory.id, name, reason)
            trajectory.outcome = Outcome.REWARD_MISSING
            trajectory.metadata["reward_missing"] = f"{name}: {reason}"
            return
        for name, score in scores.items():
            record(trajectory, name, score, self._weights[name])
        await_rewards(trajectory, {name: self._weights[name] for name in late})


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, VerifierFailed) else f"{type(error).__name__}: {error}"
