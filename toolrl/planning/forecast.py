"""What a simulated run gave, in the words of a run's own metrics, and which part holds it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from toolrl.planning.layout import Layout
from toolrl.planning.rates import Rates

NEAR = 0.85  # of a part's own limit: that part is the bottleneck


@dataclass
class Tally:
    """Counts of the simulated steps. `*_s` of engines and boxes are means over workers."""

    started: float = 0.0
    workers: int = 1  # that were played
    wall_s: float = 0.0
    waits: list[float] = field(default_factory=list)
    learning: list[float] = field(default_factory=list)
    publishing: list[float] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    stale: int = 0
    sampled: int = 0
    tokens: float = 0.0
    engine_busy_s: float = 0.0
    request_s: float = 0.0
    boxes_s: float = 0.0
    box_wait_s: float = 0.0

    def step(self, wait_s: float, learn_s: float, publish_s: float, ages: Sequence[int]) -> None:
        """One step is done."""
        self.waits.append(wait_s)
        self.learning.append(learn_s)
        self.publishing.append(publish_s)
        self.ages += ages


@dataclass(frozen=True)
class Forecast:
    """Rates are of the whole layout; shares are of the clock. `limits`: trajectories/s that each part could give if it
    never waited for another."""

    trajectories_per_s: float
    tokens_per_s: float  # prompts, sampled and shown tokens of trained trajectories
    step_s: float
    learner_idle: float
    engine_idle: float
    engine_requests: float  # mean of an engine that is not idle
    boxes: float  # mean of those held on a worker
    box_wait_s: float  # of an episode
    staleness_mean: float
    staleness_max: int
    stale_share: float  # of groups, thrown away because too old
    limits: dict[str, float]
    bottleneck: str
    gpus: int

    @classmethod
    def of(cls, tally: Tally, rates: Rates, layout: Layout) -> Forecast:
        """Of the whole layout, by the part of it that was played."""
        steps = len(tally.waits)
        sampled = max(tally.sampled, 1)
        reached = steps * layout.batch / tally.wall_s
        limits = _limits(tally, rates, layout)
        return cls(
            trajectories_per_s=reached,
            tokens_per_s=reached * tally.tokens / sampled,
            step_s=tally.wall_s / steps,
            learner_idle=sum(tally.waits) / tally.wall_s,
            engine_idle=max(0.0, 1 - tally.engine_busy_s / tally.wall_s),
            engine_requests=tally.request_s / max(tally.engine_busy_s, 1e-9),
            boxes=tally.boxes_s / tally.wall_s,
            box_wait_s=tally.box_wait_s / sampled,
            staleness_mean=sum(tally.ages) / max(len(tally.ages), 1),
            staleness_max=max(tally.ages, default=0),
            stale_share=tally.stale / max(tally.stale + len(tally.ages), 1),
            limits=limits,
            bottleneck=_bottleneck(reached, limits, layout),
            gpus=layout.gpus,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _limits(tally: Tally, rates: Rates, layout: Layout) -> dict[str, float]:
    learning_s = (sum(tally.learning) + sum(tally.publishing)) / len(tally.waits)
    engine_s = _engine_s(rates, layout)
    limits = {
        "learner": layout.batch / learning_s,
        "engines": layout.workers / engine_s,
        "replay buffer": rates.buffer.trajectories_per_s,
    }
    if layout.boxes and tally.boxes_s:
        hold_s = tally.boxes_s * tally.workers / max(tally.sampled, 1)
        limits["interpreters"] = layout.workers * layout.boxes / hold_s
    machine = rates.machine
    if machine.cores:
        learner_s = learning_s / layout.batch * machine.learner_cores * layout.learner_ranks
        turns = rates.episode.turns
        others_s = turns * rates.engine.turn_s + (turns - 1) * machine.call_core_s
        limits["processors"] = machine.cores / (engine_s * machine.engine_cores + learner_s + others_s)
    return limits


def _engine_s(rates: Rates, layout: Layout) -> float:
    """Engine seconds of one trajectory while an engine always decodes as many requests as fit."""
    engine, episode = rates.engine, rates.episode
    most = min(layout.concurrency, layout.engine_requests)
    step_s = engine.step_s + (most - 1) * engine.step_s_each
    read = episode.prompt_tokens / layout.group_size + (episode.turns - 1) * episode.observation_tokens
    decoding_s = episode.turns * episode.turn_tokens * step_s / most
    return max(decoding_s + read / engine.prefill_tokens_per_s, episode.turns * engine.turn_s)


def _bottleneck(reached: float, limits: dict[str, float], layout: Layout) -> str:
    name = min(limits, key=lambda each: limits[each])
    if reached >= NEAR * limits[name]:
        return name
    if layout.max_staleness == 0:
        return "taking turns (buffer.max_staleness=0)"
    return "slow episodes: the learner waits for the last of a batch (raise buffer.max_staleness)"
