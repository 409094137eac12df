"""Whether the parts fit their GPUs: an estimate from the model's size, good to a fifth or so. What it leaves out: fragmentation,
NCCL's buffers, kernels that need more than usual.

- A learner rank holds weights, gradients and Adam's state as its ZeRO stage splits them, a frozen reference where something needs
  one, what ZeRO-3 gathers at a time, the activations of one packed row (its share of it under sequence parallelism), and the
  logits of one chunk.
- An engine holds the weights, and keys and values of the requests that it decodes.
- Where they take turns on one GPU, the learner has all but a sleeping engine's context in its turn, and keeps its weights in the
  engine's.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolrl.config import RunConfig
from toolrl.errors import UserError
from toolrl.guards.actions import needs_reference
from toolrl.guards.presets import rules
from toolrl.placement import learner_state_bytes, takes_turns
from toolrl.planning.hardware import GPUS, billions, cache_bytes, episodes_of

# (billions of parameters, layers, width) of usual dense models
SHAPES = (
    (0.5, 24, 896),
    (1.5, 28, 1536),
    (4.0, 36, 2560),
    (8.0, 36, 4096),
    (14.0, 40, 5120),
    (32.0, 64, 5120),
    (72.0, 80, 8192),
)
LAYER_BYTES = 34  # of a layer's activations for each token and unit of width, in 16 bits, with a fused attention kernel
BACKWARD_BYTES = 48  # the same while one layer is computed again and differentiated
VOCABULARY = 152_000
LOGIT_BUFFERS = 3  # in float32, of one chunk
GATHERED = 1_000_000_000  # parameters that ZeRO-3 holds at a time, unless told otherwise
ENGINE_OVERHEAD = 4e9  # bytes a GPU: activations, CUDA graphs, communication
USABLE = 0.95  # of a GPU: the driver and the libraries take some
CONTEXT = 1.5e9  # bytes that a process keeps of a GPU whatever it gives up


@dataclass(frozen=True)
class Fit:
    """Bytes of one GPU, part by part. `holds`: requests of usual length whose keys and values an engine has room for."""

    gpu: float
    learner: dict[str, float]
    learner_room: float
    engine_weights: float
    cache: float
    cache_tokens: float
    request_tokens: float

    @property
    def holds(self) -> int:
        return max(1, int(self.cache_tokens / self.request_tokens))

    def problems(self, config: RunConfig) -> list[str]:
        """What will not fit, or only just, and what to change."""
        found = []
        need = sum(self.learner.values())
        if need > self.learner_room:
            parts = ", ".join(f"{name} {size / 1e9:.0f}" for name, size in self.learner.items() if size >= 5e8)
            found.append(
                f"a learner rank needs about {need / 1e9:.0f} GB of the {self.learner_room / 1e9:.0f} GB that it has ({parts}): "
                "raise learner.ranks, learner.zero_stage or learner.sequence_parallel, set gradient_checkpointing or "
                "offload, or lower learner.tokens_per_micro_batch"
            )
        wanted = min(config.engine.max_concurrent_requests, config.rollout.concurrency)
        if self.holds < wanted / 4:
            found.append(
                f"an engine's cache holds about {self.holds} requests of {self.request_tokens:,.0f} tokens of the {wanted} that "
                "may run at once: the others wait, or are computed again; raise engine.tensor_parallel, or lower "
                "rollout.concurrency and engine.max_concurrent_requests"
            )
        return found


def fit(config: RunConfig, gpu: str, *, model_billions: float | None = None) -> Fit:
    """The estimate for a config on such GPUs.

    Raises:
        UserError: weights and optimiser state alone are more than a rank has, or an engine has no room for one request of
            `rollout.max_context_tokens`.
    """
    one, size = GPUS[gpu], (model_billions or billions(config.model.path)) * 1e9
    share = config.engine.gpu_memory_share
    room = _learner_room(config, one.memory)
    learner = _learner(config, size)
    if learner["weights, gradients, optimiser"] > room:
        raise UserError(
            f"weights, gradients and optimiser state take {learner['weights, gradients, optimiser'] / 1e9:.0f} GB of a learner "
            f"rank, and {gpu} has {room / 1e9:.0f} GB for them; raise learner.ranks (now {config.learner.ranks}) or "
            f"learner.zero_stage (now {config.learner.zero_stage}), or set learner.offload"
        )
    if takes_turns(config) and (stays := _stays(config, size)) > one.memory * (USABLE - share):
        raise UserError(
            f"while engines generate a learner rank keeps {stays / 1e9:.0f} GB, and engine.gpu_memory_share={share:g} leaves "
            f"{one.memory * (USABLE - share) / 1e9:.0f} GB of {gpu}; lower it"
        )
    parallel = config.engine.tensor_parallel * config.engine.pipeline_parallel
    cache = parallel * (one.memory * share - ENGINE_OVERHEAD) - 2 * size
    tokens = cache / cache_bytes(size / 1e9)
    if tokens < config.rollout.max_context_tokens:
        raise UserError(
            f"an engine of {parallel} × {gpu} with engine.gpu_memory_share={share:g} has room for {max(0, tokens):,.0f} tokens "
            f"of keys and values beside its weights, and one request may take rollout.max_context_tokens="
            f"{config.rollout.max_context_tokens}; raise engine.tensor_parallel or the share"
        )
    episode = episodes_of(config)
    usual = episode.prompt_tokens + episode.turns * (episode.turn_tokens + episode.observation_tokens) / 2
    return Fit(one.memory, learner, room, 2 * size / parallel, cache / parallel, tokens, usual)


def _learner_room(config: RunConfig, memory: float) -> float:
    if not takes_turns(config):
        return memory * USABLE
    if config.learner.offload_while_generating == "never":
        return memory * (1 - config.engine.gpu_memory_share)
    return memory * USABLE - CONTEXT


def _stays(config: RunConfig, size: float) -> float:
    """Of a learner rank on the GPU in the engines' turn."""
    if config.learner.offload_while_generating == "never":
        return CONTEXT + learner_state_bytes(config, size / 1e9)
    return CONTEXT + 2 * size / (config.learner.ranks if config.learner.zero_stage >= 3 else 1)


def _learner(config: RunConfig, size: float) -> dict[str, float]:
    learner = config.learner
    split = learner.ranks if learner.zero_stage >= 3 else 1
    _, layers, width = min(SHAPES, key=lambda shape: abs(shape[0] - size / 1e9))
    of_number = 1.0 if config.model.dtype == "bfloat16" else 2.0
    tokens = learner.tokens_per_micro_batch / learner.sequence_parallel
    if learner.gradient_checkpointing:
        activations = tokens * width * of_number * (2 * layers + BACKWARD_BYTES)
    else:
        activations = tokens * width * of_number * (LAYER_BYTES * layers)
    zero = learner.deepspeed.get("zero_optimization", {})
    live = min(size, float(zero.get("stage3_max_live_parameters", GATHERED))) if learner.zero_stage >= 3 else 0.0
    return {
        "weights, gradients, optimiser": learner_state_bytes(config, size / 1e9),
        "reference": 2 * size / split if _keeps_reference(config) else 0.0,
        "gathered weights": 2 * live,
        "activations": activations,
        "logits": LOGIT_BUFFERS * 4.0 * VOCABULARY * min(learner.logprob_chunk_tokens, tokens),
    }


def _keeps_reference(config: RunConfig) -> bool:
    if config.model.lora.rank or config.learner.offload_reference:
        return False  # the policy without its adapter, or in the host's memory
    held = any(part.name == "kl" for part in config.algorithm.regularizers)
    return held or needs_reference(rule.action.name for rule in rules(config))
