"""Settings of the learner that cannot be honoured are refused with their reason, before anything starts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from toolrl.config import (
    AlgorithmConfig,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    Named,
    PlacementConfig,
    RunConfig,
)
from toolrl.config_checks import problems
from toolrl.config_deepspeed import PASSED, REFUSED, deepspeed_problems


def told(zero_stage: int = 0, **settings: Any) -> dict[str, str]:
    found = deepspeed_problems(LearnerConfig(zero_stage=zero_stage, deepspeed=settings))
    return {problem.key.removeprefix("learner.deepspeed."): problem.message for problem in found}


def test_what_deepspeed_honours_passes() -> None:
    assert not told(
        3,
        zero_optimization={"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0},
        bf16={"bf16_master_weights_and_grads": False},
        wall_clock_breakdown=True,
    )
    assert not told(1, zero_optimization={"offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000})


@pytest.mark.parametrize(
    ("key", "value", "because"),
    [
        ("sequence_parallel_size", 2, "learner.sequence_parallel"),
        ("gradient_accumulation_steps", 4, "plans micro-batches"),
        ("gradient_clipping", 1.0, "learner.gradient_clip"),
        ("optimizer", {"type": "Adam"}, "would ignore"),
        ("fp16", {"enabled": True}, "model.dtype"),
        ("tensor_parallel", {"autotp_size": 2}, "whole vocabulary"),
        ("zero_optimisation", {}, "ignore this key.*zero_optimization"),
    ],
)
def test_what_it_would_ignore_or_break_is_refused_with_the_reason(key: str, value: Any, because: str) -> None:
    assert re.search(because, told(**{key: value})[key])


def test_zero_settings_need_their_stage() -> None:
    offloads = {
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        "stage3_max_live_parameters": 9,
    }
    assert set(told(0, zero_optimization=offloads)) == {f"zero_optimization.{key}" for key in offloads}
    assert set(told(2, zero_optimization=offloads)) == {
        "zero_optimization.offload_param",
        "zero_optimization.stage3_max_live_parameters",
    }
    assert not told(3, zero_optimization=offloads)
    assert "learner.zero_stage" in told(1, zero_optimization={"stage": 3})["zero_optimization.stage"]
    assert (
        "exact ones"
        in told(3, zero_optimization={"zero_quantized_weights": True})["zero_optimization.zero_quantized_weights"]
    )


def test_no_key_is_both_passed_and_refused() -> None:
    assert not PASSED & REFUSED.keys()


def keys(config: RunConfig) -> dict[str, bool]:
    """Key of each problem with these settings -> whether it only warns."""
    return {problem.key: problem.warning for problem in problems(config)}


def test_the_run_checks_hear_of_them() -> None:
    found = keys(RunConfig(learner=LearnerConfig(deepspeed={"sequence_parallel_size": 2})))
    assert found["learner.deepspeed.sequence_parallel_size"] is False


def test_an_adapter_with_dropout_or_frozen_weights_is_refused() -> None:
    found = keys(RunConfig(model=ModelConfig(frozen=["*"], lora=LoraConfig(rank=8, dropout=0.1, target_modules=[]))))
    assert {"model.lora.dropout", "model.lora.target_modules", "model.frozen"} <= found.keys()
    fine = keys(RunConfig(model=ModelConfig(lora=LoraConfig(rank=8))))
    assert not [key for key in fine if key.startswith("model.lora") or key == "model.frozen"]


def test_an_offloaded_reference_on_a_cpu_is_only_odd() -> None:
    config = RunConfig(
        algorithm=AlgorithmConfig(regularizers=[Named("kl", {"weight": 0.1})]),
        learner=LearnerConfig(offload_reference=True),
        placement=PlacementConfig(device="cpu"),
    )
    assert keys(config)["learner.offload_reference"] is True
    config.placement.device = "cuda"
    assert "learner.offload_reference" not in keys(config)
