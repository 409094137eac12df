"""`overlong`: a soft limit on length: the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13)."""

from __future__ import annotations

from toolrl.rewards.component import RewardContext, rewards
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory


@rewards.register("overlong")
def overlong(
    trajectory: Trajectory, task: Task, context: RewardContext, *, max_tokens: int, ramp_tokens: int | None = None
) -> float:
    """With L sampled tokens: 0 up to max_tokens − ramp_tokens, then linearly to −1 at max_tokens, −1 beyond.

    Only what the policy sampled counts: the length of a tool's output is not its doing. So a trajectory that is cut off
    by a limit which counts both (`rollout.max_response_tokens`) may have had less than its length allows.

    Args:
        max_tokens: where the whole penalty is reached; in a recipe or a file `${rollout.max_response_tokens}`.
        ramp_tokens: length of the ramp, 0 for a step; None: a fifth of max_tokens (DAPO: 4,096 of 20,480).
    """
    ramp = max_tokens // 5 if ramp_tokens is None else ramp_tokens
    length = sum(len(turn.token_ids) for turn in trajectory.policy_turns)
    excess = length - (max_tokens - ramp)
    return -min(1.0, max(0.0, excess / max(ramp, 1)))
