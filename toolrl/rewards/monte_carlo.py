"""`monte_carlo`: a step is worth the solve rate of episodes that go on from it, played by the policy on its own engines.

The rollout workers do that (`actors.monte_carlo`) after the trajectory has ended and deliver the credit of its turns as a late
reward. The value after the last turn is the trajectory's own score. What a turn earns is what the value gained or lost
there (`toolrl.rewards.step_scores`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from toolrl.rewards.budget import is_measured
from toolrl.rewards.component import Pending, RewardContext, rewards
from toolrl.rewards.step_scores import Aggregate, Per
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory, Turn

NAME = "monte_carlo"
Choose = Literal["even", "uncertain"]


@dataclass(frozen=True)
class MonteCarloOptions:
    """See `monte_carlo`."""

    share: float
    continuations: int
    boundaries: int
    choose: Choose
    concurrency: int
    aggregate: Aggregate
    per: Per


@rewards.register("monte_carlo")
def monte_carlo(
    trajectory: Trajectory,
    task: Task,
    context: RewardContext,
    *,
    share: float = 0.25,
    continuations: int = 4,
    boundaries: int = 4,
    choose: Choose = "even",
    concurrency: int = 16,
    aggregate: Aggregate = "last",
    per: Per = "turn",
) -> float | Pending:
    """Comes late; 0 in groups that are not measured.

    Args:
        share: of the groups; in a measured group every trajectory is.
        continuations: played from each boundary.
        boundaries: turn boundaries of a trajectory that are measured, at most.
        choose: which: evenly spread, or those after the turns that the policy was least sure of.
        concurrency: continuations at once on each rollout worker, beside `rollout.concurrency`.
        aggregate, per: see `toolrl.rewards.step_scores`.
    """
    return Pending() if is_measured(trajectory.group_id, share, NAME) else 0.0


def chosen_boundaries(trajectory: Trajectory, most: int, choose: Choose) -> list[int]:
    """After how many policy turns the trajectory is continued, increasing: at most `most` of its turn boundaries, each
    between a policy turn with its tool turn and the next policy turn."""
    last = len(trajectory.policy_turns) - 1
    boundaries = list(range(1, last + 1))
    if len(boundaries) <= most:
        return boundaries
    if choose == "uncertain":
        by_doubt = sorted(boundaries, key=lambda done: _surprise(trajectory.policy_turns[done - 1]), reverse=True)
        return sorted(by_doubt[:most])
    return [boundaries[(2 * place + 1) * last // (2 * most)] for place in range(most)]


def _surprise(turn: Turn) -> float:
    """Mean negative log-probability of a turn's tokens in nats: what its sampled tokens say of its entropy."""
    return -sum(turn.logprobs) / len(turn.logprobs) if turn.logprobs else 0.0
