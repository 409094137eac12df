"""Rewards: named components with weights, each logged by its name.

`RewardPipeline(config, checker).score(trajectory, task)` writes what each component gives into
`trajectory.rewards[name]` or, turn by turn, into `turn.rewards[name]`; `GroupRewards.of(config).score(groups)` does the
same for those that compare a group's samples. Importing this package registers the components
that come with toolrl.
"""

from __future__ import annotations

from toolrl.reward_records import Score, reward_id
from toolrl.rewards import (
    attention_mass,
    call_cost,
    call_failure,
    call_success,
    call_validity,
    code_similarity,
    format,
    interaction,
    masked_result,
    monte_carlo,
    outcome,
    overlong,
    parse_failure,
    prm,
    result_use,
    timeout,
)
from toolrl.rewards.component import Component, Pending, RewardContext, calls_and_results, rewards, scored_at, stage_of
from toolrl.rewards.group_context import GroupContext
from toolrl.rewards.group_rewards import GroupRewards
from toolrl.rewards.pipeline import RewardPipeline

__all__ = [
    "Component",
    "GroupContext",
    "GroupRewards",
    "Pending",
    "RewardContext",
    "RewardPipeline",
    "Score",
    "calls_and_results",
    "register",
    "reward_id",
    "rewards",
    "scored_at",
    "stage_of",
]

register = rewards.register
# Importing them registers their components.
_BUILT_IN = (
    attention_mass,
    call_cost,
    call_failure,
    call_success,
    call_validity,
    code_similarity,
    format,
    interaction,
    masked_result,
    monte_carlo,
    outcome,
    overlong,
    parse_failure,
    prm,
    result_use,
    timeout,
)
