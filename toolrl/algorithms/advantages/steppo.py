"""StepPO (arXiv 2604.18401): generalised advantage estimation over steps, with a critic. A step is one policy turn.

    δ_j = r_j + γ V_{j+1} − V_j,  V_{n+1} = 0;   Â_j = Σ_l (γλ)^l δ_{j+l};   every token of turn j gets Â_j
    value target of V_j: Â_j + V_j, before any whitening

V_j is read at the last token before the step's first action token. Defaults: γ = .99, λ = 1, advantages whitened over all
steps of the batch (ddof 1, ε 1e-8).

Traps. Whitening moves the zero: with it an advantage's sign compares with the batch, not with V (LLDS's A ≥ 0 too).
The target is not whitened, or the critic would chase its own scale. With λ = 1 the target is the plain discounted return
and V is a baseline only; λ < 1 trusts the critic, so warm it up first. Goes with the policy loss `steppo`.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolrl.algorithms.advantages.steps import gae, step_rewards, whitened
from toolrl.algorithms.registries import advantage_registry, needs
from toolrl.trajectory import Trajectory


def steppo(
    turn_rewards: Sequence[Sequence[float]],
    values: Sequence[Sequence[float]],
    gamma: float = 0.99,
    lam: float = 1.0,
    whiten: bool = True,
) -> list[list[float]]:
    """Advantages of the whole batch: one list a trajectory, one number a step.

    Args:
        turn_rewards: r[i][j]; the last step's holds the outcome.
        values: V[i][j], of the same shape.
        whiten: over all steps of the batch; a batch of one step then has advantage 0.

    Raises:
        ValueError: not one value a step.
    """
    rows = [gae(r, v, gamma, lam) for r, v in zip(turn_rewards, values, strict=True)]
    return whitened(rows) if whiten else rows


def steppo_returns(
    turn_rewards: Sequence[Sequence[float]], values: Sequence[Sequence[float]], gamma: float = 0.99, lam: float = 1.0
) -> list[list[float]]:
    """What the critic is trained towards: the unwhitened advantage plus the value it was measured against."""
    rows = steppo(turn_rewards, values, gamma, lam, whiten=False)
    return [[a + v for a, v in zip(row, known, strict=True)] for row, known in zip(rows, values, strict=True)]


def steppo_targets(
    batch: Sequence[Trajectory],
    values: Sequence[Sequence[float]],
    gamma: float = 0.99,
    lam: float = 1.0,
    whiten: bool = True,
) -> list[list[float]]:
    """`steppo_returns` of recorded trajectories; takes the advantage's options, of which `whiten` changes nothing."""
    return steppo_returns([step_rewards(member) for member in batch], values, gamma, lam)


@advantage_registry.register("steppo")
@needs("values", targets=steppo_targets)
def steppo_batch(
    batch: Sequence[Trajectory],
    values: Sequence[Sequence[float]],
    gamma: float = 0.99,
    lam: float = 1.0,
    whiten: bool = True,
) -> list[list[float]]:
    """StepPO on recorded trajectories and the critic's values, one V a policy turn."""
    return steppo([step_rewards(member) for member in batch], values, gamma, lam, whiten)
