"""Advantages, one a file: `grpo`, `gtpo`. Each also registers its form over recorded trajectories (see `groups`)."""

from toolrl.algorithms.advantages.grpo import grpo
from toolrl.algorithms.advantages.gtpo import gtpo, gtpo_outcome

__all__ = ["grpo", "gtpo", "gtpo_outcome"]
