"""RLOO, leave one out (arXiv 2402.14740): A_i = R_i − mean of the other G−1 rewards, the same for all tokens of i.

    R_i − (Σ_G R − R_i)/(G−1) = (R_i − mean_G R) · G/(G−1)

The baseline does not hold R_i, so the gradient is unbiased. Never divided by a std: nearly equal rewards give nearly 0.
Trap: advantages carry the scale of the rewards, so weights of the reward config act like a learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toolrl.algorithms.registries import advantage_registry
from toolrl.trajectory import Trajectory


def rloo(rewards: Sequence[float]) -> list[float]:
    """Advantages of one group's G rewards; 0 for a group of one."""
    size = len(rewards)
    if size < 2:
        return [0.0] * size
    values = np.asarray(rewards, dtype=np.float64)
    # The right-hand form: the left one cancels where rewards are large and nearly equal.
    advantages: list[float] = ((values - values.mean()) * (size / (size - 1))).tolist()
    return advantages


@advantage_registry.register("rloo")
def rloo_group(group: Sequence[Trajectory]) -> list[list[float]]:
    """Every policy turn of a trajectory gets the advantage of the trajectory's whole reward."""
    advantages = rloo([member.reward for member in group])
    return [[value] * len(member.policy_turns) for value, member in zip(advantages, group, strict=True)]
