"""A better division of the same GPUs, and how many interpreters it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from toolrl.planning.forecast import Forecast
from toolrl.planning.layout import Layout
from toolrl.planning.rates import Rates
from toolrl.planning.simulation import simulate

ENOUGH = 0.01  # of an episode may be waiting for an interpreter
MOST_TRIED = 12
PLAYED = 2  # workers, while layouts are compared: an eighth of the time, and the same order


@dataclass(frozen=True)
class Split:
    """A layout and what it gives."""

    layout: Layout
    forecast: Forecast


def best_split(
    rates: Rates,
    layout: Layout,
    gpus: int,
    *,
    least_ranks: int = 1,
    ranks_of_a_row: int = 1,
    steps: int = 8,
    seed: int = 0,
) -> Split:
    """The division of `gpus` between engines and learner ranks that trains most trajectories/s.

    The batch stays as it is. Of equal ones (within 1 %) the one with fewer learner ranks is taken.

    Args:
        least_ranks: learner ranks that the model's weights and optimiser state need.
        ranks_of_a_row: that share a row (`learner.sequence_parallel`); their number divides that of all ranks.

    Raises:
        ValueError: so few GPUs hold no engine beside the learner.
    """
    tried = [
        Split(each, simulate(rates, each, steps=steps, seed=seed, most_workers=PLAYED))
        for each in divisions(layout, gpus, least_ranks=least_ranks, ranks_of_a_row=ranks_of_a_row)
    ]
    if not tried:
        raise ValueError(
            f"{gpus} GPUs hold no engine of tensor_parallel={layout.tensor_parallel} beside {least_ranks} learner ranks"
        )
    most = max(each.forecast.trajectories_per_s for each in tried)
    good = [each for each in tried if each.forecast.trajectories_per_s >= 0.99 * most]
    return with_enough_boxes(rates, min(good, key=lambda each: each.layout.learner_ranks), steps=steps, seed=seed)


def divisions(layout: Layout, gpus: int, *, least_ranks: int = 1, ranks_of_a_row: int = 1) -> Iterator[Layout]:
    """At most `MOST_TRIED` ways to give some GPUs to the learner and the rest to engines, evenly spread."""
    ways = [
        (ranks, (gpus - ranks) // layout.tensor_parallel)
        for ranks in range(least_ranks, gpus)
        if ranks % ranks_of_a_row == 0
        and (gpus - ranks) % layout.tensor_parallel == 0
        and gpus - ranks >= layout.tensor_parallel
    ]
    stride = max(1, math.ceil(len(ways) / MOST_TRIED))
    for ranks, workers in ways[::stride]:
        yield replace(layout, workers=workers, learner_ranks=ranks, colocated=False)


def with_enough_boxes(rates: Rates, split: Split, *, steps: int = 8, seed: int = 0) -> Split:
    """The same with as many interpreters a worker as its episodes hold, and some for the peaks."""
    if not split.layout.boxes:
        return Split(split.layout, simulate(rates, split.layout, steps=steps, seed=seed))
    free = replace(split.layout, boxes=max(split.layout.boxes, split.layout.concurrency * 4))
    unbounded = simulate(rates, free, steps=steps, seed=seed, most_workers=PLAYED)
    boxes = max(1, math.ceil(unbounded.boxes * 1.1))
    while True:
        layout = replace(split.layout, boxes=boxes)
        forecast = simulate(rates, layout, steps=steps, seed=seed, most_workers=PLAYED)
        episode_s = rates.episode.turns * rates.tool.mean_s + forecast.step_s
        if forecast.box_wait_s <= ENOUGH * episode_s or boxes >= free.boxes:
            return Split(layout, simulate(rates, layout, steps=steps, seed=seed))
        boxes = min(free.boxes, math.ceil(boxes * 1.25))
