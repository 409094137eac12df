"""Rewards of a user's own, found by import path."""

from toolrl.rewards import RewardContext
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory


def evenness(trajectory: Trajectory, task: Task, context: RewardContext) -> float:
    """The share of even token ids: something that a policy of random weights differs in from the first step on."""
    sampled = [token for turn in trajectory.policy_turns for token in turn.token_ids]
    return sum(token % 2 == 0 for token in sampled) / max(len(sampled), 1)


def sampled_by(trajectory: Trajectory, task: Task, context: RewardContext, *, version: int) -> float:
    """1 where the weights of `version` sampled the first token: a batch that a guard can be told to see."""
    turns = [turn.weight_versions for turn in trajectory.policy_turns if turn.weight_versions]
    return float(bool(turns) and turns[0][0] == version)
