"""A step as one plain line, and the names and formats of the numbers that a person wants to see first."""

from __future__ import annotations

import math
from collections.abc import Mapping

POLICY_TOKENS_PER_S = "speed/policy_tokens_per_s"


def number(metrics: Mapping[str, float], name: str, form: str = ".2f") -> str:
    """A metric, or `–` where it is missing or not finite."""
    value = metrics.get(name)
    return "–" if value is None or not math.isfinite(value) else format(value, form)


def duration(seconds: float) -> str:
    """12 s, 3:05, 1:02:03."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


_DEPTHS = ("waiting", "generating", "ready", "leased")


def queue_depths(metrics: Mapping[str, float]) -> str:
    """`3 waiting, 16 generating, 2 ready, 0 leased`: groups, from the buffer's own counts; those that wait for late rewards
    where there are some."""
    depths = [
        f"{metrics[f'buffer/groups_{name}']:.0f} {name}" for name in _DEPTHS if f"buffer/groups_{name}" in metrics
    ]
    if unrewarded := metrics.get("buffer/groups_unrewarded"):
        depths.append(f"{unrewarded:.0f} unrewarded")
    return ", ".join(depths)


def step_line(step: int, steps: int, metrics: Mapping[str, float], left_s: float) -> str:
    """One log line a step, for pipes, files and `--quiet`."""
    parts = [
        f"step {step}/{steps}",
        f"reward {number(metrics, 'reward/mean', '.3f')}±{number(metrics, 'reward/std')}",
        f"calls {number(metrics, 'tool/call_rate')} ({number(metrics, 'tool/calls_per_trajectory')} each)",
        f"healthy {number(metrics, 'format/healthy')}",
        f"staleness {number(metrics, 'staleness/mean')}",
        f"loss {number(metrics, 'loss/policy', '.4f')}",
        f"ratio max {number(metrics, 'ratio/max', '.3f')}",
        f"clipped {number(metrics, 'ratio/clip_fraction', '.1%')}",
        f"entropy {number(metrics, 'entropy/mean', '.3f')}",
        f"{number(metrics, POLICY_TOKENS_PER_S, '.0f')} tok/s",
    ]
    if depths := queue_depths(metrics):
        parts.append(f"groups {depths}")
    parts.append(f"left {duration(left_s)}")
    return "  ".join(parts)
