"""Monitors: what a batch of trajectories says about the policy, as named metrics."""

from toolrl.monitors.batch import batch_metrics

__all__ = ["batch_metrics"]
