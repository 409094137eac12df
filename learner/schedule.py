"""Learning rates by optimiser step: warm-up from 0, then constant, linear or cosine down to 0. Pure, so nothing needs
saving."""

from __future__ import annotations

import math


def learning_rate(step: int, *, base: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """The rate of optimiser step `step` (from 0); after `total_steps` a decaying schedule stays at 0.

    Raises:
        ValueError: unknown schedule.
    """
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "constant":
        return base
    if schedule == "linear":
        return base * (1 - progress)
    if schedule == "cosine":
        return base * (1 + math.cos(math.pi * progress)) / 2
    raise ValueError(f"unknown schedule {schedule!r}; known: constant, cosine, linear")
