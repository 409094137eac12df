"""What vLLM is started with follows from our settings, and nothing of it leaks into the process afterwards."""

from __future__ import annotations

import os

import pytest

from actors.engine_setup import engine_arguments, engine_environment, environment
from toolrl.config import EngineConfig


def arguments(config: EngineConfig | None = None, **changes: object) -> dict[str, object]:
    settings: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "max_context_tokens": 4096,
        "seed": 3,
        "transport": "shared_memory",
    }
    return engine_arguments("model", config or EngineConfig(), **(settings | changes))  # type: ignore[arg-type]


def test_on_a_cpu_one_step_holds_the_longest_prompt_whole() -> None:
    # Prompts in parts kill the CPU backend when a request has a seed.
    given = arguments(max_context_tokens=10_000)
    assert given["enable_chunked_prefill"] is False
    assert given["max_num_batched_tokens"] == 10_000
    assert arguments(max_context_tokens=128)["max_num_batched_tokens"] == 2048


def test_a_gpu_keeps_vllms_own_scheduling_and_memory() -> None:
    given = arguments(EngineConfig(gpu_memory_share=0.7), device="cuda", transport="nccl", sleepable=True)
    assert given.keys().isdisjoint({"enable_chunked_prefill", "max_num_batched_tokens", "kv_cache_memory_bytes"})
    assert (given["gpu_memory_utilization"], given["enable_sleep_mode"]) == (0.7, True)
    assert given["weight_transfer_config"] == {"backend": "toolrl_nccl"}


def test_kv_cache_may_be_a_part_of_a_gib() -> None:
    assert arguments(EngineConfig(kv_cache_gib=0.25))["kv_cache_memory_bytes"] == 1 << 28


def test_options_have_the_last_word_except_on_what_rollouts_rest_on() -> None:
    assert arguments(EngineConfig(options={"block_size": 64}))["block_size"] == 64
    with pytest.raises(ValueError, match=r"engine\.options sets logprobs_mode"):
        arguments(EngineConfig(options={"logprobs_mode": "raw_logprobs"}))


def test_a_single_cpu_engine_is_one_process_without_pinned_threads() -> None:
    given = engine_environment(EngineConfig(cpu_threads=2), device="cpu")
    assert given["OMP_NUM_THREADS"] == "2"
    assert (given["VLLM_ENABLE_V1_MULTIPROCESSING"], given["VLLM_CPU_OMP_THREADS_BIND"]) == ("0", "nobind")
    assert arguments()["distributed_executor_backend"] == "uni"
    two = EngineConfig(tensor_parallel=2)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in engine_environment(two, device="cpu")
    assert arguments(two)["distributed_executor_backend"] == "mp"


def test_compiled_engines_may_compile() -> None:
    assert "TORCHDYNAMO_DISABLE" in engine_environment(EngineConfig(eager=True), device="cpu")
    assert "TORCHDYNAMO_DISABLE" not in engine_environment(EngineConfig(eager=False), device="cpu")


def test_the_environment_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLRL_A", "old")
    monkeypatch.setenv("VLLM_X", "the user's")
    for name in ("TOOLRL_B", "LD_PRELOAD", "TOOLRL_C"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    with pytest.raises(RuntimeError), environment({"TOOLRL_A": "new", "TOOLRL_B": "1"}):
        assert (os.environ["TOOLRL_A"], os.environ["TOOLRL_B"]) == ("new", "1")
        os.environ["VLLM_X"] = os.environ["LD_PRELOAD"] = "vLLM's own"
        os.environ["TOOLRL_C"] = "set by someone else meanwhile"
        raise RuntimeError
    assert dict(os.environ) == before | {"TOOLRL_C": "set by someone else meanwhile"}
    monkeypatch.delenv("TOOLRL_C")
