"""What of DeepSpeed's own config `learner.deepspeed` may set: the rest is ours, or would be ignored, or would not be exact.

DeepSpeed ignores keys that it does not know and many that it cannot honour; here each is refused with its reason.
Imports neither torch nor DeepSpeed. Written for DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolrl.config import LearnerConfig
from toolrl.errors import Problem
from toolrl.registry import nearest

# Top-level keys that reach DeepSpeed as they are.
PASSED = frozenset(
    (
        *("zero_optimization", "bf16", "data_types", "communication_data_type", "aio", "checkpoint", "compile"),
        *("comms_logger", "flops_profiler", "wall_clock_breakdown", "memory_breakdown", "dump_state", "timers"),
        "log_level",
    )
)
_CUT = "the learner plans micro-batches by tokens and says itself where a step ends"
REFUSED: dict[str, str] = {
    "train_batch_size": _CUT,
    "train_micro_batch_size_per_gpu": _CUT,
    "gradient_accumulation_steps": _CUT,
    "managed_gradient_accumulation": _CUT,
    "gradient_clipping": "set learner.gradient_clip",
    "optimizer": "DeepSpeed would ignore it: the optimiser is AdamW with learner.learning_rate, betas and weight_decay",
    "scheduler": "DeepSpeed would ignore it: set learner.schedule and learner.warmup_steps",
    "fp16": "float16 has no exact place here: set model.dtype to float32 or bfloat16",
    "amp": "mixed precision of another kind: set model.dtype=bfloat16",
    "torch_autocast": "log-probabilities would no longer have one dtype: set model.dtype=bfloat16",
    "sequence_parallel_size": "set learner.sequence_parallel",
    "seq_parallel_communication_data_type": "states are exchanged in model.dtype, or ranks would compute with rounded ones",
    "tensor_parallel": "packed log-probabilities need the whole vocabulary and every head on each rank; use zero_stage=3",
    "pipeline": "the model is called as a whole; use zero_stage=3",
    "prescale_gradients": "losses are divided by global counts already; the gradient would be wrong",
    "gradient_predivide_factor": "losses are divided by global counts already; the gradient would be wrong",
    "gradient_allreduce_op": "losses are divided by global counts already; the gradient would be wrong",
    "data_efficiency": "it would leave out tokens of recorded trajectories",
    "curriculum_learning": "it would leave out tokens of recorded trajectories",
    "progressive_layer_drop": "the same tokens would have other log-probabilities in each pass",
    "compression_training": "the engines serve the weights as they are published, uncompressed",
    "weight_quantization": "the engines serve the weights as they are published, not quantised",
    "hybrid_engine": "vLLM generates",
    "steps_per_print": "metrics are in the run folder",
}
_ZERO_REFUSED: dict[str, str] = {
    "stage": "set learner.zero_stage",
    "zero_quantized_weights": "ranks would compute with rounded weights, and the engines get the exact ones",
    "zero_quantized_nontrainable_weights": "ranks would compute with rounded weights, and the engines get the exact ones",
    "zero_quantized_gradients": "the result would depend on the number of ranks",
    "zenflow": "steps would be applied late and in part",
    "cpu_offload": "set learner.offload",
    "cpu_offload_param": "set offload_param: {device: cpu}",
    "cpu_offload_use_pin_memory": "set offload_param: {device: cpu, pin_memory: true}",
    "elastic_checkpoint": "a checkpoint is for one number of ranks",
}


def deepspeed_problems(config: LearnerConfig) -> Iterator[Problem]:
    """Every setting of `learner.deepspeed` that cannot be honoured."""
    for key, value in config.deepspeed.items():
        if key in REFUSED:
            yield Problem(f"learner.deepspeed.{key}", REFUSED[key], value)
        elif key not in PASSED:
            known = sorted(PASSED | REFUSED.keys())
            yield Problem(f"learner.deepspeed.{key}", f"DeepSpeed would ignore this key{nearest(key, known)}", value)
    zero = config.deepspeed.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield Problem("learner.deepspeed.zero_optimization", "must be a block of settings", zero)
        return
    yield from _zero_problems(config, zero)


def _zero_problems(config: LearnerConfig, zero: dict[str, Any]) -> Iterator[Problem]:
    where = "learner.deepspeed.zero_optimization"
    for key, value in zero.items():
        if key in _ZERO_REFUSED and value not in (False, None):
            yield Problem(f"{where}.{key}", _ZERO_REFUSED[key], value)
        elif key.startswith("stage3_") and config.zero_stage < 3:
            yield Problem(f"{where}.{key}", f"needs learner.zero_stage=3, which is {config.zero_stage}", value)
    if zero.get("offload_param") and config.zero_stage < 3:
        message = f"only ZeRO-3 splits parameters and can offload them; learner.zero_stage is {config.zero_stage}"
        yield Problem(f"{where}.offload_param", message, zero["offload_param"])
    if zero.get("offload_optimizer") and config.zero_stage < 1:
        message = "needs learner.zero_stage=1 or higher: stage 0 does not split the optimiser"
        yield Problem(f"{where}.offload_optimizer", message, zero["offload_optimizer"])
