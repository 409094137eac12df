"""`sft_burst`: a few supervised steps on reference traces, for a policy that loses its call format."""

from __future__ import annotations

from toolrl.guards.actions.action import Controls, Decision, Order, guard_actions


@guard_actions.register("sft_burst")
def sft_burst(
    controls: Controls,
    decision: Decision,
    *,
    steps: int = 8,
    batch_size: int = 16,
    learning_rate: float | None = None,
) -> Order:
    """`steps` optimiser steps on `batch_size` reference trajectories each, then new weights for the engines.

    Args:
        learning_rate: None: that of the schedule now, as guards have it.
    """
    return Order("sft_burst", {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate})
