"""What the advantages over turns share: a step is one policy turn, its reward what the turn earned, the last one's also
what the trajectory earned.

For values V_1..V_n (V_j read at the last token before step j's first action token) and V_{n+1} = 0:

    δ_j = r_j + γ V_{j+1} − V_j        Â_j = Σ_l (γλ)^l δ_{j+l}
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toolrl.trajectory import Trajectory

WHITENING_EPSILON = 1e-8


def step_rewards(trajectory: Trajectory) -> list[float]:
    """[n_policy_turns] each turn's rewards; the last turn's hold the trajectory's own too."""
    rewards = trajectory.turn_rewards
    if rewards:
        rewards[-1] += trajectory.outcome_reward
    return rewards


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    """[n] R_j = Σ_{k≥j} γ^{k−j} r_k."""
    returns = [0.0] * len(rewards)
    ahead = 0.0
    for index in range(len(rewards) - 1, -1, -1):
        ahead = rewards[index] + gamma * ahead
        returns[index] = ahead
    return returns


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Generalised advantage estimates of one trajectory, [n], by the recursion Â_j = δ_j + γλ Â_{j+1}.

    Raises:
        ValueError: not one value a step.
    """
    if len(rewards) != len(values):
        raise ValueError(f"{len(rewards)} steps but {len(values)} values; give one V for each policy turn")
    estimates = [0.0] * len(rewards)
    ahead_value = ahead = 0.0
    for index in range(len(rewards) - 1, -1, -1):
        delta = rewards[index] + gamma * ahead_value - values[index]
        ahead = delta + gamma * lam * ahead
        ahead_value = values[index]
        estimates[index] = ahead
    return estimates


def whitened(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """(A − mean)/(std + 1e-8) over all steps of all rows, ddof 1; a single step becomes 0."""
    pool = np.asarray([value for row in rows for value in row], dtype=np.float64)
    if pool.size < 2:
        return [[0.0] * len(row) for row in rows]
    mean, std = float(pool.mean()), float(pool.std(ddof=1))
    return [[(value - mean) / (std + WHITENING_EPSILON) for value in row] for row in rows]
