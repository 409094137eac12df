"""The mathematics of training: advantages, policy losses, corrections, regularisers, aggregation. Pure functions over
tensors and lists.

`policy_losses.ctpo(…)`, `advantages.gtpo(…)`, `corrections.tis(…)`, `regularizers.kl(…)` and `aggregate(…)` are usable
from outside; `registries` finds them by name; `group_advantages` applies an advantage to recorded trajectories.
Tensors are [B, T], one row a trajectory, T over its response positions.
"""

from toolrl.algorithms import advantages, corrections, embedders, policy_losses, regularizers
from toolrl.algorithms.aggregation import aggregate
from toolrl.algorithms.groups import group_advantages

__all__ = [
    "advantages",
    "aggregate",
    "corrections",
    "embedders",
    "group_advantages",
    "policy_losses",
    "regularizers",
]
