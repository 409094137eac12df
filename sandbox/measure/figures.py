"""A measured figure, and how times become one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One row. `met` is empty where there is no target."""

    what: str
    value: float
    unit: str
    p99: float | None = None
    target: str = ""
    met: str = ""


def times_figure(what: str, times_s: list[float], p50_ms: float = 0.0, p99_ms: float = 0.0) -> Figure:
    """Median and 99th percentile in milliseconds, against targets above 0."""
    p50, p99 = median_ms(times_s), percentile_ms(times_s, 99)
    target = [f"p50 ≤ {p50_ms:g}"] if p50_ms else []
    target += [f"p99 ≤ {p99_ms:g}"] if p99_ms else []
    missed = (p50_ms and p50 > p50_ms) or (p99_ms and p99 > p99_ms)
    return Figure(what, p50, "ms", p99, ", ".join(target), ("no" if missed else "yes") if target else "")


def ratio_figure(what: str, ratio: float, at_least: float = 0.0) -> Figure:
    """A ratio of medians that were measured in the same run."""
    target = f"≥ {at_least:g}" if at_least else ""
    return Figure(what, ratio, "×", None, target, ("yes" if ratio >= at_least else "no") if at_least else "")


def median_ms(times_s: list[float]) -> float:
    """Median in milliseconds."""
    return statistics.median(times_s) * 1e3


def percentile_ms(times_s: list[float], percent: int) -> float:
    """A percentile in milliseconds; the largest where there are few."""
    if len(times_s) < 100:
        return max(times_s) * 1e3
    return statistics.quantiles(times_s, n=100)[percent - 1] * 1e3


async def timed(action: Callable[[], Awaitable[object]], rounds: int, warm_up: int = 0) -> list[float]:
    """Seconds of each of `rounds` after `warm_up` others."""
    times = []
    for number in range(warm_up + rounds):
        started = time.perf_counter()
        await action()
        if number >= warm_up:
            times.append(time.perf_counter() - started)
    return times
