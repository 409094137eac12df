"""Rewards: named components with weights, each logged by its name.

`RewardPipeline(config, checker).score(trajectory, task)` writes what each component gives into
`trajectory.rewards[name]` or, turn by turn, into `turn.rewards[name]`. Importing this package registers the components
that come with toolrl.
"""

from __future__ import annotations

from toolrl.rewards import call_cost, call_failure, format, outcome, overlong, timeout
from toolrl.rewards.component import Component, RewardContext, Score, calls_and_results, rewards
from toolrl.rewards.pipeline import RewardPipeline

__all__ = ["Component", "RewardContext", "RewardPipeline", "Score", "calls_and_results", "register", "rewards"]

register = rewards.register
_BUILT_IN = (call_cost, call_failure, format, outcome, overlong, timeout)  # importing them registers their components
