"""GTPO, Group Turn Policy Optimization (arXiv 2511.14846): discounted turn returns, normalised over the group.

    r[i,j] = turn reward + (outcome[i] if j is the last turn)
    R[i,j] = Σ_{k≥j} γ^{k−j} r[i,k]
    outcome of a wrong trajectory = (α/|P|) · Σ_{p∈P} max(0, cos(e(code_i), e(code_p))), P the correct ones; 0 without
    P or code

Trap: with γ < 1 a right answer after one call is worth γ at its first turn and a right direct answer 1, an implicit
price on calls that trained them away (6 of 6 runs at γ = .9). `discount_outcome=False` discounts only the turn rewards
and gives every turn the full outcome; True is the paper. Divide by |P| once (a public port divides twice).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from toolrl.algorithms.advantages.grpo import EPSILON
from toolrl.algorithms.registries import advantage_registry, embedder_registry
from toolrl.trajectory import Trajectory

Normalize = Literal["pooled", "per_turn", "first_return"]
CORRECT = 1.0 - 1e-6  # a partial credit is not a correct answer


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
    returns = [_discounted(rewards, gamma) for rewards in turn_rewards]
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


def gtpo_outcome(
    correct: Sequence[float], embeddings: Sequence[Sequence[float] | None], alpha: float = 0.5
) -> list[float]:
    """Shaped outcomes of one group: 1 where `correct` is 1, else α times the mean similarity to the correct ones' code.

    Args:
        correct: G floats, 1 for a correct trajectory.
        embeddings: G vectors of each trajectory's joined code; None: no code (outcome 0 when wrong; as a correct one
            it adds 0).
    """
    units = [_unit(embedding) for embedding in embeddings]
    right = [unit for value, unit in zip(correct, units, strict=True) if value >= CORRECT]
    shaped = []
    for value, unit in zip(correct, units, strict=True):
        if value >= CORRECT:
            shaped.append(1.0)
        elif unit is None or not right:
            shaped.append(0.0)
        else:
            similar = sum(max(0.0, float(unit @ other)) for other in right if other is not None)
            shaped.append(alpha * similar / len(right))
    return shaped


@advantage_registry.register("gtpo")
def gtpo_group(
    group: Sequence[Trajectory],
    gamma: float = 0.9,
    normalize: Normalize = "pooled",
    alpha: float = 0.5,
    discount_outcome: bool = True,
    embedder: str = "hashed_ngrams",
    outcome_reward: str = "outcome",
) -> list[list[float]]:
    """GTPO on recorded trajectories.

    The trajectory reward named `outcome_reward` is the verifier's; a trajectory is correct when it is 1 (weight it by
    1). That of a wrong trajectory is raised to its shaped outcome (`alpha=0` switches the shaping off); further
    trajectory rewards add to it.
    """
    correct = [member.rewards.get(outcome_reward, 0.0) for member in group]
    shaped = [0.0] * len(group)
    if alpha and any(value >= CORRECT for value in correct) and any(value < CORRECT for value in correct):
        embed = embedder_registry.get(embedder)
        codes = [code_of(member) for member in group]
        shaped = gtpo_outcome(correct, [embed(code) if code else None for code in codes], alpha)
    outcomes = [
        member.outcome_reward + (max(0.0, extra - value) if value < CORRECT else 0.0)
        for member, value, extra in zip(group, correct, shaped, strict=True)
    ]
    turn_rewards = [member.turn_rewards for member in group]
    if not discount_outcome:
        return gtpo(turn_rewards, gamma, normalize, outcomes=outcomes)
    for rewards, outcome in zip(turn_rewards, outcomes, strict=True):
        rewards[-1] += outcome
    return gtpo(turn_rewards, gamma, normalize)


def code_of(trajectory: Trajectory) -> str:
    """All code of the trajectory joined: the string argument `code` of every call."""
    codes = [call.arguments.get("code") for turn in trajectory.policy_turns for call in turn.calls]
    return "\n".join(code for code in codes if isinstance(code, str))


def _discounted(rewards: Sequence[float], gamma: float) -> np.ndarray:
    returns = np.zeros(len(rewards))
    ahead = 0.0
    for index in range(len(rewards) - 1, -1, -1):
        ahead = rewards[index] + gamma * ahead
        returns[index] = ahead
    return returns


def _per_turn(played: Sequence[np.ndarray], pooled: tuple[float, float]) -> list[tuple[float, float]]:
    statistics = []
    for index in range(max(values.size for values in played)):
        column = np.array([values[index] for values in played if values.size > index])
        alone = column.size < 2
        statistics.append(pooled if alone else (float(column.mean()), float(column.std(ddof=1))))
    return statistics


def _unit(embedding: Sequence[float] | None) -> np.ndarray | None:
    if embedding is None:
        return None
    vector = np.asarray(embedding, dtype=np.float64)
    length = float(np.linalg.norm(vector))
    return vector / length if length else vector
