"""λ-returns over turns (Sutton and Barto, chapter 12), for trajectories whose reward or tool result comes late.

    G_j^{(n)} = Σ_{k<n} γ^k r_{j+k} + γ^n V_{j+n}                    n-step return; V past the end is `bootstrap`
    G_j^λ = (1−λ) Σ_{n≥1} λ^{n−1} G_j^{(n)}                          the last term takes the remaining weight
          = r_j + γ((1−λ) V_{j+1} + λ G_{j+1}^λ)                     computed so, from the end
    advantage: Â_j = G_j^λ − V_j;   value target of V_j: G_j^λ

The critic stands in for what has not arrived: with λ < 1 a turn is credited by the values after it and not by the late
reward alone. Defaults on recorded trajectories: γ = .99, λ = .95, whitened over all steps of the batch as in `steppo`.

A trajectory that is trained before all of its rewards are there (`rewards.late.bootstrap`) counts as cut off before its
last turn, where they would have been: V_n bootstraps the turns before it, is its own target there, and the last turn's
advantage is exactly 0, whitened or not. What nobody has judged is neither encouraged nor discouraged.

Traps. G^λ − V is generalised advantage estimation: at equal γ and λ the two methods are one, the defaults differ
(λ = 1 there). λ < 1 is biased by a critic that knows nothing yet; warm it up. A reward that passes its deadline is no
late reward: where groups wait, that trajectory is `reward_missing` and takes part in nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolrl.algorithms.advantages.steps import step_rewards, whitened
from toolrl.algorithms.registries import advantage_registry, needs
from toolrl.reward_records import awaited_rewards
from toolrl.trajectory import Trajectory


def lambda_return(
    turn_rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float, *, bootstrap: float = 0.0
) -> list[float]:
    """λ-returns of one trajectory, one a turn; subtract `values` for advantages.

    Args:
        turn_rewards: r_1..r_n; the last holds the outcome.
        values: V_1..V_n.
        bootstrap: V after the last turn; 0 where the episode ended, the critic's where it was only cut off.

    Raises:
        ValueError: not one value a turn.
    """
    if len(turn_rewards) != len(values):
        raise ValueError(f"{len(turn_rewards)} turns but {len(values)} values; give one V for each policy turn")
    returns = [0.0] * len(turn_rewards)
    ahead_value = ahead = bootstrap
    for index in range(len(turn_rewards) - 1, -1, -1):
        ahead = turn_rewards[index] + gamma * ((1 - lam) * ahead_value + lam * ahead)
        ahead_value = values[index]
        returns[index] = ahead
    return returns


def lambda_return_targets(
    batch: Sequence[Trajectory],
    values: Sequence[Sequence[float]],
    gamma: float = 0.99,
    lam: float = 0.95,
    whiten: bool = True,
) -> list[list[float]]:
    """What the critic is trained towards; takes the advantage's options, of which `whiten` changes nothing."""
    return [_returns(m, v, gamma, lam) for m, v in zip(batch, values, strict=True)]


def _returns(trajectory: Trajectory, values: Sequence[float], gamma: float, lam: float) -> list[float]:
    rewards = step_rewards(trajectory)
    if not awaited_rewards(trajectory):
        return lambda_return(rewards, values, gamma, lam)
    return [*lambda_return(rewards[:-1], values[:-1], gamma, lam, bootstrap=values[-1]), values[-1]]


@advantage_registry.register("lambda_return")
@needs("values", targets=lambda_return_targets)
def lambda_return_batch(
    batch: Sequence[Trajectory],
    values: Sequence[Sequence[float]],
    gamma: float = 0.99,
    lam: float = 0.95,
    whiten: bool = True,
) -> list[list[float]]:
    """G^λ − V on recorded trajectories and the critic's values, one V a policy turn."""
    returns = lambda_return_targets(batch, values, gamma, lam)
    rows = [[g - v for g, v in zip(row, known, strict=True)] for row, known in zip(returns, values, strict=True)]
    if not whiten:
        return rows
    cut = [int(bool(awaited_rewards(member))) for member in batch]
    known_rows = whitened([row[: len(row) - n] for row, n in zip(rows, cut, strict=True)])
    return [[*row, *[0.0] * n] for row, n in zip(known_rows, cut, strict=True)]
