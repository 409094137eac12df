"""Rates that nobody has measured: estimates from a GPU's data sheet and a model's size. Good for a first plan, no more.

- Decoding reads the weights once a step and each request's cache, and multiplies 2 operations a parameter and token.
- A learner step costs 8 operations a parameter and token: 2 for old log-probabilities, 6 for forward and backward; 2 more with
  gradient checkpointing.
- Shares of the peak that are reached (`REACHED`) are what well-tuned systems report; measure your own as soon as you can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolrl.config import RunConfig
from toolrl.errors import UserError
from toolrl.placement import billions_of
from toolrl.planning.rates import EngineRates, EpisodeRates, LearnerRates, MachineRates, Rates, WeightRates
from toolrl.registry import nearest


@dataclass(frozen=True)
class Gpu:
    """Peaks by the vendor's data sheet: dense bfloat16 operations/s, memory bytes/s, memory bytes."""

    flops: float
    bytes_per_s: float
    memory: float


GPUS = {
    "a100-80g": Gpu(312e12, 2.04e12, 80e9),
    "h100": Gpu(989e12, 3.35e12, 80e9),
    "h200": Gpu(989e12, 4.8e12, 141e9),
    "b200": Gpu(2250e12, 8.0e12, 180e9),
    "l40s": Gpu(362e12, 0.864e12, 48e9),
}
REACHED = {"decoding bytes": 0.6, "decoding operations": 0.4, "prefill": 0.5, "learning": 0.4}
STEP_OVERHEAD_S = 0.004  # of a decoding step: launches, sampling, scheduling
TENSOR_PARALLEL_LOSS = 0.1  # of the speed, each time the GPUs of an engine double
TURN_S = 0.001  # of the worker's event loop: parsing, the template's delta, messages
PCIE_BYTES_PER_S = 25e9  # between a GPU and its host
TURN_CHANGE_S = 1.0  # colocated: of engines that fall asleep and wake again, besides the learner's bytes
LEARNER_BYTES = 18  # of weights, gradients and Adam's state for each parameter


def billions(model: str) -> float:
    """Parameters by the model's name ("Qwen/Qwen3-4B" → 4). Raises UserError where the name says nothing."""
    found = billions_of(model)
    if not found:
        raise UserError(f"how large is {model!r}? its name does not say; give --billions N (parameters in 10⁹)")
    return found


def cache_bytes(billion: float) -> float:
    """Key and value bytes of a token in bfloat16: usual shapes with grouped heads (measured models lie within 2×)."""
    for most, size in ((1.0, 14e3), (2.0, 30e3), (9.0, 140e3), (20.0, 170e3)):
        if billion <= most:
            return size
    return 270e3


def estimated(config: RunConfig, gpu: str, *, model_billions: float | None = None) -> Rates:
    """Rates of the config's model on such GPUs.

    Raises:
        UserError: an unknown GPU, a model of unknown size, or one that does not fit an engine's GPUs.
    """
    if gpu not in GPUS:
        raise UserError(f"unknown GPU {gpu!r}{nearest(gpu, list(GPUS))}")
    one, size = GPUS[gpu], (model_billions or billions(config.model.path)) * 1e9
    parallel = config.engine.tensor_parallel * config.engine.pipeline_parallel
    if 2 * size > one.memory * parallel * config.engine.gpu_memory_share:
        raise UserError(
            f"the weights ({2 * size / 1e9:.0f} GB) do not fit an engine of {parallel} × {gpu} with "
            f"engine.gpu_memory_share={config.engine.gpu_memory_share:g}; raise engine.tensor_parallel"
        )
    episode = episodes_of(config)
    speed = parallel * (1 - TENSOR_PARALLEL_LOSS) ** (parallel - 1).bit_length()
    context = episode.prompt_tokens + episode.turns * (episode.turn_tokens + episode.observation_tokens) / 2
    read_s = 1 / (one.bytes_per_s * REACHED["decoding bytes"] * speed)
    compute_s = 2 * size / (one.flops * REACHED["decoding operations"] * speed)
    turn_s = 0.0
    if config.placement.mode == "colocated":  # all but the weights goes to the host and back
        turn_s = TURN_CHANGE_S + 2 * (LEARNER_BYTES - 2) * size / config.learner.ranks / PCIE_BYTES_PER_S
    operations = 10 if config.learner.gradient_checkpointing else 8
    return Rates(
        engine=EngineRates(
            step_s=STEP_OVERHEAD_S + 2 * size * read_s,
            step_s_each=cache_bytes(size / 1e9) * context * read_s + compute_s,
            prefill_tokens_per_s=one.flops * REACHED["prefill"] * speed / (2 * size),
            turn_s=TURN_S,
        ),
        episode=episode,
        learner=LearnerRates(tokens_per_s=one.flops * REACHED["learning"] / (operations * size), step_s=2.0),
        weights=WeightRates(bytes=2 * size, turn_s=turn_s),
        machine=MachineRates(),
        source=f"estimated from the data sheet of {gpu} for {size / 1e9:g} B parameters",
    )


def episodes_of(config: RunConfig) -> EpisodeRates:
    """A guess by the config's limits: half of the context, a third of the turns."""
    rollout = config.rollout
    turns = max(1.0, min(rollout.max_turns, rollout.max_calls + 1) / 3)
    response = rollout.max_response_tokens / 2
    observation = min(rollout.max_observation_tokens / 4, response / turns / 2)
    return EpisodeRates(
        prompt_tokens=min(512.0, rollout.max_context_tokens / 4),
        turns=turns,
        turn_tokens=max(1.0, min(response / turns - observation, rollout.max_turn_tokens / 2)),
        observation_tokens=observation,
    )


def least_learner_ranks(config: RunConfig, gpu: str, *, model_billions: float | None = None) -> int:
    """Ranks whose memory holds weights, gradients and optimiser state, with a third left for activations (ZeRO-3)."""
    size = (model_billions or billions(config.model.path)) * 1e9
    bytes_each = 6 if config.learner.offload else LEARNER_BYTES
    together = config.learner.sequence_parallel
    return together * math.ceil(bytes_each * size / (GPUS[gpu].memory * 2 / 3) / together)
