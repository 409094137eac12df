"""`masked_result`: how much less sure of its answer the policy is when a call's result is taken out of its sight.

The learner is asked before advantages are computed (`toolrl.app.measured_rewards`): the log-probability of the answer's
tokens as they are, minus the same with the tokens of the results hidden from all that follows, positions kept. A result that
the answer does not rest on earns about 0, whatever stands in it; so does one of two results that say the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolrl.rewards.component import rewards, scored_at
from toolrl.trajectory import Trajectory


@rewards.register("masked_result")
@scored_at("learner")
def masked_result(
    trajectory: Trajectory,
    drops: Sequence[float | None],
    *,
    share: float = 0.25,
    full_nats: float = 3.0,
    outcome_reward: str | None = "outcome",
) -> list[float]:
    """For each policy turn 0 to 1, by what the results of its calls were worth to the answer.

    Args:
        drops: [n_policy_turns] nats that the answer loses without the results of the turn's calls; None: not measured.
        share: of the groups that are measured; in such a group every trajectory is.
        full_nats: a drop that earns 1. With 3, the answer is 20 times less likely without the result.
        outcome_reward: paid only where this reward of the trajectory is above 0; None: always.
    """
    if outcome_reward is not None and trajectory.rewards.get(outcome_reward, 0.0) <= 0:
        return [0.0] * len(drops)
    return [min(max(drop or 0.0, 0.0) / full_nats, 1.0) for drop in drops]
