"""What vLLM is started with: its arguments and environment variables, from our settings. Imports no vLLM.

Invariants:
- Log-probabilities are those of the sampling distribution (`processed_logprobs`), and nothing but our own stop tokens
  ends a request (the model folder's generation config is ignored).
- On one CPU device the model runs inside the engine process, without thread pinning: two processes instead of three,
  and a learner on the same cores is not crowded onto one of them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from toolrl.config import EngineConfig, LoraConfig
from toolrl.config_adapter_checks import LARGEST_SERVED_RANK
from toolrl.weight_transport import Transport

Device = Literal["cpu", "cuda"]

GIB = 1 << 30
BACKENDS: dict[Transport, str] = {name: f"toolrl_{name}" for name in ("shared_memory", "gloo", "nccl", "ipc")}  # vLLM's
# A conversation turn is short: with vLLM's CPU default of 128 tokens a block, most of a small prefix would never be
# found.
CPU_BLOCK_TOKENS = 32
CPU_STEP_TOKENS = 2048
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, LARGEST_SERVED_RANK)  # that vLLM (0.32) can make room for
_VLLMS = re.compile(r"VLLM_|TORCHINDUCTOR_|NUMEXPR_MAX_THREADS$|OMP_NUM_THREADS$|LD_PRELOAD$")


def engine_arguments(
    model_dir: str | Path,
    config: EngineConfig,
    *,
    device: Device,
    dtype: str,
    max_context_tokens: int,
    seed: int,
    transport: Transport,
    sleepable: bool = False,
    adapter: LoraConfig | None = None,
    meeting: tuple[str, int] | None = None,
) -> dict[str, Any]:
    """Keyword arguments for vLLM's `AsyncEngineArgs`; `config.options` has the last word. `adapter`: the one to serve.
    `meeting`: address and port where the processes of an engine over several nodes find each other; the arguments are those of
    its first node, others change `node_rank`.

    Raises:
        ValueError: `config.options` sets something that the engine's promises rest on.
    """
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_context_tokens,
        "max_num_seqs": config.max_concurrent_requests,
        "tensor_parallel_size": config.tensor_parallel,
        "pipeline_parallel_size": config.pipeline_parallel,
        "enforce_eager": config.eager,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "enable_log_requests": False,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": BACKENDS[transport]},
    }
    if device == "cpu":
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * GIB)
        arguments["block_size"] = CPU_BLOCK_TOKENS
        # vLLM's CPU backend dies when a request with a seed of its own is prefilled in parts ("CPU Generator does not
        # use offset", 0.32); whole prompts it is, so the budget of one step must hold the longest.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(CPU_STEP_TOKENS, max_context_tokens)
        arguments["distributed_executor_backend"] = "uni" if processes_of(config) == 1 else "mp"
    else:
        if (
            processes_of(config) > 1
        ):  # of its own accord vLLM would ask Ray for processes, where there is a placement group
            arguments["distributed_executor_backend"] = "mp"
        arguments["gpu_memory_utilization"] = config.gpu_memory_share
        arguments["enable_sleep_mode"] = sleepable
    if adapter is not None:
        arguments |= adapter_arguments(adapter)
    if meeting is not None:
        arguments |= {"nnodes": config.nodes, "node_rank": 0, "master_addr": meeting[0], "master_port": meeting[1]}
    fixed = {"model", "logprobs_mode", "generation_config", "skip_tokenizer_init", "weight_transfer_config"}
    if clash := sorted(fixed & config.options.keys()):
        raise ValueError(f"engine.options sets {', '.join(clash)}, which the rollouts depend on; remove it")
    return arguments | config.options


def processes_of(config: EngineConfig) -> int:
    """Processes of an engine that hold a share of the model, on all of its nodes together."""
    return config.tensor_parallel * config.pipeline_parallel


def adapter_arguments(adapter: LoraConfig) -> dict[str, Any]:
    """For an engine that serves the base weights and one adapter over them; only layers that it adapts pay for it."""
    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": min(rank for rank in ADAPTER_RANKS if rank >= adapter.rank),
    }
    if list(adapter.target_modules) != ["all-linear"]:
        arguments["lora_target_modules"] = sorted({name.rsplit(".", 1)[-1] for name in adapter.target_modules})
    return arguments


def served_adapter(lora: LoraConfig) -> LoraConfig | None:
    """The adapter that engines of a run with these settings serve; None: they get whole weights."""
    return lora if lora.rank and lora.publish == "adapter" else None


def engine_environment(config: EngineConfig, *, device: Device) -> dict[str, str]:
    """Environment variables for the start of an engine and for the processes it starts."""
    variables = {
        "HF_HUB_OFFLINE": "1",  # the model folder is complete
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(config.start_deadline_s))),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    if device == "cpu":
        variables["OMP_NUM_THREADS"] = str(config.cpu_threads)
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if processes_of(config) == 1:
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else vLLM puts the model into a third process
        if config.eager:
            # vLLM compiles a few of its sampler's functions even so: 16 s at the first request, for no speed on a CPU.
            variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets `variables`, and afterwards puts them back, and those that vLLM sets itself for its processes too."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name in variables or _VLLMS.match(name)]:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def resolve_device(device: Literal["auto", "cpu", "cuda"]) -> Device:
    """`auto` is the GPU where torch sees one."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
