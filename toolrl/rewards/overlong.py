"""`overlong`: a soft limit on length (ALGORITHMS 5)."""

from __future__ import annotations

from toolrl.rewards.component import RewardContext, rewards
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory


@rewards.register("overlong")
def overlong(trajectory: Trajectory, task: Task, context: RewardContext, *, max_tokens: int, ramp_tokens: int) -> float:
    """0 up to max_tokens − ramp_tokens sampled tokens, then linearly to −1 at max_tokens; a ramp of 0 is a step."""
    length = sum(len(turn.token_ids) for turn in trajectory.policy_turns)
    excess = length - (max_tokens - ramp_tokens)
    return -min(1.0, max(0.0, excess / max(ramp_tokens, 1)))
