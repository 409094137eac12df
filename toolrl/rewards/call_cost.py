"""`call_cost`: a price per call, so that a call pays only where it makes the answer right."""

from __future__ import annotations

import math

from toolrl.rewards.component import RewardContext, rewards
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory


@rewards.register("call_cost")
def call_cost(
    trajectory: Trajectory, task: Task, context: RewardContext, *, cost: float = 0.1, most: float | None = None
) -> list[float]:
    """−cost for every call that a turn makes, whatever comes of it.

    Args:
        most: what all calls of a trajectory cost at most; the first ones pay. Below the reward of a right answer, so that
            a right answer is never worth less than silence. None: no bound.
    """
    left = math.inf if most is None else most
    prices = []
    for turn in trajectory.policy_turns:
        price = min(cost * len(turn.calls), left)
        left -= price
        prices.append(-price)
    return prices
