"""GTPO, Group Turn Policy Optimization (arXiv 2511.14846): discounted turn returns, normalised over the group.

    r[i,j] = turn reward + (outcome[i] if j is the last turn)
    R[i,j] = Σ_{k≥j} γ^{k−j} r[i,k]
    Â[i,j] = (R[i,j] − mean)/(std + 1e-6), mean and std of a set that `normalize` names; every token of turn j gets it

The outcome of a wrong trajectory is shaped by its code's likeness to that of the right ones: that is the group reward
`code_similarity`, and part of the outcome here like any other reward of the trajectory. Defaults: γ = .9, `pooled`.

Traps. With γ < 1 a right answer after one call is worth γ at its first turn and a right direct answer 1, an implicit
price on calls that trained them away (6 of 6 runs at γ = .9). `discount_outcome=False` discounts only the turn rewards
and gives every turn the full outcome; True is the paper. Turns are the recorded ones, never runs of the mask: a tool
that returns nothing would merge two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from toolrl.algorithms.advantages.grpo import EPSILON
from toolrl.algorithms.advantages.steps import discounted
from toolrl.algorithms.registries import advantage_registry
from toolrl.trajectory import Trajectory

Normalize = Literal["pooled", "per_turn", "first_return"]


def gtpo(
    turn_rewards: Sequence[Sequence[float]],
    gamma: float = 0.9,
    normalize: Normalize = "pooled",
    *,
    outcomes: Sequence[float] | None = None,
) -> list[list[float]]:
    """Advantages of one group: G lists of turn rewards -> G lists; all 0 for a group of one.

    Args:
        turn_rewards: r[i][j]; in the paper's form the last turn's holds the outcome.
        gamma: discount between turns.
        normalize: `pooled` (all returns of the group, ddof 0), `per_turn` (index j over the group, ddof 1; a turn that
            only one trajectory has falls back to pooled), `first_return` (mean and std of R[i,1] over the group, ddof
            1).
        outcomes: G outcomes that every turn gets undiscounted (`discount_outcome=False`); then not part of
            `turn_rewards`.
    """
    returns = [np.asarray(discounted(rewards, gamma)) for rewards in turn_rewards]
    if outcomes is not None:
        returns = [values + outcome for values, outcome in zip(returns, outcomes, strict=True)]
    played = [values for values in returns if values.size]
    if len(played) < 2:
        return [[0.0] * values.size for values in returns]
    pool = np.concatenate(played)
    pooled = (float(pool.mean()), float(pool.std(ddof=0)))
    if normalize == "pooled":
        statistics = [pooled] * max(values.size for values in played)
    elif normalize == "first_return":
        first = np.array([values[0] for values in played])
        statistics = [(float(first.mean()), float(first.std(ddof=1)))] * max(values.size for values in played)
    elif normalize == "per_turn":
        statistics = _per_turn(played, pooled)
    else:
        raise ValueError(f"gtpo: unknown normalisation {normalize!r}; known: pooled, per_turn, first_return")
    return [
        [(value - mean) / (std + EPSILON) for value, (mean, std) in zip(values.tolist(), statistics, strict=False)]
        for values in returns
    ]


@advantage_registry.register("gtpo")
def gtpo_group(
    group: Sequence[Trajectory], gamma: float = 0.9, normalize: Normalize = "pooled", discount_outcome: bool = True
) -> list[list[float]]:
    """GTPO on recorded trajectories: the rewards of the whole trajectory are its outcome."""
    outcomes = [member.outcome_reward for member in group]
    turn_rewards = [member.turn_rewards for member in group]
    if not discount_outcome:
        return gtpo(turn_rewards, gamma, normalize, outcomes=outcomes)
    for rewards, outcome in zip(turn_rewards, outcomes, strict=True):
        rewards[-1] += outcome
    return gtpo(turn_rewards, gamma, normalize)


def _per_turn(played: Sequence[np.ndarray], pooled: tuple[float, float]) -> list[tuple[float, float]]:
    statistics = []
    for index in range(max(values.size for values in played)):
        column = np.array([values[index] for values in played if values.size > index])
        alone = column.size < 2
        statistics.append(pooled if alone else (float(column.mean()), float(column.std(ddof=1))))
    return statistics
