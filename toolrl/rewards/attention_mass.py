"""`attention_mass`: the attention that later policy tokens give to a call's results, beyond what falls to them by their length.

The learner is asked before advantages are computed (`toolrl.app.measured_rewards`, `learner.attention_mass`). Attention spread
evenly would give a result of m of n tokens the mass u = m / n; a mass a earns (a − u) / (1 − u), so printing more earns
nothing by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolrl.rewards.component import rewards, scored_at
from toolrl.trajectory import Trajectory


@rewards.register("attention_mass")
@scored_at("learner")
def attention_mass(
    trajectory: Trajectory,
    masses: Sequence[tuple[float, float] | None],
    *,
    share: float = 0.25,
    layer: int = -1,
    outcome_reward: str | None = "outcome",
) -> list[float]:
    """For each policy turn 0 to 1.

    Args:
        masses: [n_policy_turns] (mass on the results of the turn's calls, what it were if spread evenly); None: not measured.
        share: of the groups that are measured; in such a group every trajectory is.
        layer: of the policy whose attention is read, the mean over its heads; negative ones count from the last.
        outcome_reward: paid only where this reward of the trajectory is above 0; None: always.
    """
    if outcome_reward is not None and trajectory.rewards.get(outcome_reward, 0.0) <= 0:
        return [0.0] * len(masses)
    return [0.0 if each is None else _excess(*each) for each in masses]


def _excess(mass: float, evenly: float) -> float:
    return max(mass - evenly, 0.0) / (1 - evenly) if evenly < 1 else 0.0
