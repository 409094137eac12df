"""The rates that a plan is made from: how fast each part is, and what an episode is like. Imports no torch.

Seconds, tokens, bytes. One engine decodes `c` requests at once in steps of `step_s + (c − 1) · step_s_each` seconds, one
token for each request a step: the shape of every batched decoder, reading the weights once and each request's cache.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from toolrl.errors import UserError
from toolrl.registry import nearest


@dataclass(frozen=True)
class EngineRates:
    """One rollout worker's engine."""

    step_s: float = 0.02  # a decoding step with one request
    step_s_each: float = 0.0001  # what each further request adds to it
    prefill_tokens_per_s: float = 20_000.0  # of new context: prompts without their shared prefix, tool results
    turn_s: float = 0.0  # of each turn outside the engine: parsing, messages


@dataclass(frozen=True)
class EpisodeRates:
    """What an episode is like. Lengths are log-normal, turns geometric (up to the config's limit)."""

    prompt_tokens: float = 500.0
    turns: float = 4.0  # policy turns, mean
    turn_tokens: float = 300.0  # sampled in one turn, mean
    turn_tokens_spread: float = 0.7  # standard deviation of the lengths, as a share of their mean
    observation_tokens: float = 200.0  # what a tool turn adds


@dataclass(frozen=True)
class ToolRates:
    """One call, from the model's end token to its result; log-normal."""

    mean_s: float = 0.05
    p99_s: float = 0.3


@dataclass(frozen=True)
class LearnerRates:
    """One rank: tokens that go through all of a step (old log-probabilities, forward, backward), prompts included."""

    tokens_per_s: float = 10_000.0
    step_s: float = 0.5  # of each step, whatever its size: optimiser, metrics, messages


@dataclass(frozen=True)
class WeightRates:
    """From the learner to the engines."""

    bytes: float = 8e9
    bytes_per_s: float = 20e9
    pause_s: float = 0.05  # in which an engine makes no token
    turn_s: float = 0.0  # colocated: in each step engines fall asleep and wake again


@dataclass(frozen=True)
class BufferRates:
    """The one replay buffer of a run: trajectories that it takes in, hands out and acknowledges."""

    trajectories_per_s: float = 2000.0


@dataclass(frozen=True)
class MachineRates:
    """Processors that everything shares, as on a laptop; with `cores: 0` nothing disturbs anything (GPUs)."""

    cores: float = 0.0
    engine_cores: float = 1.0  # what an engine takes while it decodes
    learner_cores: float = 1.0  # what a learner rank takes while it learns
    call_core_s: float = 0.0  # processor seconds of one call


@dataclass(frozen=True)
class Rates:
    """Everything a plan needs to know about speed."""

    engine: EngineRates = field(default_factory=EngineRates)
    episode: EpisodeRates = field(default_factory=EpisodeRates)
    tool: ToolRates = field(default_factory=ToolRates)
    learner: LearnerRates = field(default_factory=LearnerRates)
    weights: WeightRates = field(default_factory=WeightRates)
    buffer: BufferRates = field(default_factory=BufferRates)
    machine: MachineRates = field(default_factory=MachineRates)
    source: str = "the built-in example rates"

    def __post_init__(self) -> None:
        for name, value in flat(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"rates: {name}={value} must be a finite number, 0 or more")
        for name in _POSITIVE:
            if flat(self)[name] <= 0:
                raise UserError(f"rates: {name}={flat(self)[name]:g} must be above 0")
        if self.episode.turns < 1:
            raise UserError(
                f"rates: episode.turns={self.episode.turns:g} must be at least 1: an episode has a policy turn"
            )
        lognormal(self.tool.mean_s, self.tool.p99_s)


_POSITIVE = (
    "engine.step_s",
    "engine.prefill_tokens_per_s",
    "episode.turn_tokens",
    "learner.tokens_per_s",
    "weights.bytes_per_s",
    "buffer.trajectories_per_s",
)


def flat(rates: Rates) -> dict[str, float]:
    """{"engine.step_s": …}: every number by its dotted name."""
    return {
        f"{part.name}.{each.name}": float(getattr(getattr(rates, part.name), each.name))
        for part in dataclasses.fields(rates)
        if part.name != "source"
        for each in dataclasses.fields(getattr(rates, part.name))
    }


def changed(rates: Rates, values: dict[str, Any], source: str) -> Rates:
    """The same rates with others of them by dotted name.

    Raises:
        UserError: an unknown name, or what is no number.
    """
    known = flat(rates)
    parts: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        if name not in known:
            raise UserError(f"{source}: there is no rate {name!r}{nearest(name, list(known))}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{source}: {name}={value!r} must be a number")
        part, _, key = name.partition(".")
        parts.setdefault(part, {})[key] = float(value)
    new = {part: dataclasses.replace(getattr(rates, part), **numbers) for part, numbers in parts.items()}
    return dataclasses.replace(rates, **new, source=source)


def lognormal(mean: float, p99: float) -> tuple[float, float]:
    """(μ, σ) of the log-normal distribution with this mean and 99th percentile; σ = 0 for a constant.

    ln(p99 / mean) = z·σ − σ²/2 with z = 2.3263, whose smaller root is taken.

    Raises:
        UserError: no log-normal has them: p99 below the mean, or above 14.9 times it.
    """
    if mean == 0:
        return -math.inf, 0.0
    distance = math.log(p99 / mean) if p99 > 0 else -1.0
    root = _Z99**2 - 2 * distance
    if distance < 0 or root < 0:
        raise UserError(f"rates: tool.p99_s={p99:g} must lie between tool.mean_s={mean:g} and 14.9 times it")
    sigma = _Z99 - math.sqrt(root)
    return math.log(mean) - sigma**2 / 2, sigma


_Z99 = 2.3263478740408408
