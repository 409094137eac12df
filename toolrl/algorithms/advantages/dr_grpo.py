"""Dr. GRPO (arXiv 2503.20783): A_i = R_i − mean_G R, the same for all tokens of trajectory i.

No division by the group's std: that weights up groups whose samples nearly agree (very easy and very hard tasks).
Goes with the aggregation `seq_mean_token_sum_norm`, whose constant divisor removes the other bias, by length.
Trap: advantages carry the scale of the rewards, so weights of the reward config act like a learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toolrl.algorithms.registries import advantage_registry
from toolrl.trajectory import Trajectory


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Advantages of one group's G rewards; 0 for a group of one."""
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    values = np.asarray(rewards, dtype=np.float64)
    advantages: list[float] = (values - values.mean()).tolist()
    return advantages


@advantage_registry.register("dr_grpo")
def dr_grpo_group(group: Sequence[Trajectory]) -> list[list[float]]:
    """Every policy turn of a trajectory gets the advantage of the trajectory's whole reward."""
    advantages = dr_grpo([member.reward for member in group])
    return [[value] * len(member.policy_turns) for value, member in zip(advantages, group, strict=True)]
