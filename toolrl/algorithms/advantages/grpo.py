"""GRPO (arXiv 2402.03300): A_i = (R_i − mean_G R) / (std_G R + ε), the same for all tokens of trajectory i.

std with ddof 1, ε = 1e-6; a group of one has advantage 0. Traps: the division weights up groups whose samples nearly agree
(`dr_grpo` leaves it out); a group without spread gives 0 everywhere and only costs time (`loop` can drop and refill it).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toolrl.algorithms.registries import advantage_registry
from toolrl.trajectory import Trajectory

EPSILON = 1e-6


def grpo(rewards: Sequence[float]) -> list[float]:
    """Advantages of one group's G rewards; 0 for a group of one."""
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    values = np.asarray(rewards, dtype=np.float64)
    advantages: list[float] = ((values - values.mean()) / (values.std(ddof=1) + EPSILON)).tolist()
    return advantages


@advantage_registry.register("grpo")
def grpo_group(group: Sequence[Trajectory]) -> list[list[float]]:
    """Every policy turn of a trajectory gets the advantage of the trajectory's whole reward."""
    advantages = grpo([member.reward for member in group])
    return [[value] * len(member.policy_turns) for value, member in zip(advantages, group, strict=True)]
