"""Settings of a low-rank adapter that cannot work are refused before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from toolrl.config import EngineConfig, LoraConfig, ModelConfig, PlacementConfig, RunConfig, WeightsConfig
from toolrl.config_adapter_checks import adapter_problems


def refused(**changes: Any) -> set[str]:
    """The keys that are refused with these settings."""
    return {problem.key for problem in adapter_problems(RunConfig(**changes)) if not problem.warning}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"lora": LoraConfig(publish="adapter")}, "model.lora.publish"),
        ({"lora": LoraConfig(rank=1024, publish="adapter")}, "model.lora.rank"),
        ({"lora": LoraConfig(rank=8, publish="adapter", target_modules=["lm_head"])}, "model.lora.target_modules"),
        ({"placement": PlacementConfig(mode="colocated")}, "engine.sleep_level"),
        ({"weights": WeightsConfig(transport="nccl")}, "weights.transport"),
        ({"engine": EngineConfig(options={"max_loras": 2})}, "engine.options"),
    ],
)
def test_an_adapter_that_engines_could_not_serve_is_refused(changes: dict[str, Any], key: str) -> None:
    lora = changes.pop("lora", LoraConfig(rank=8, publish="adapter"))
    assert key in refused(model=ModelConfig(lora=lora), **changes)
    assert not refused(model=ModelConfig(lora=replace(lora, publish="merged")), **changes)


def test_an_adapter_that_can_be_served_is_not_refused() -> None:
    model = ModelConfig(lora=LoraConfig(rank=512, publish="adapter", target_modules=["q_proj"]))
    assert not refused(model=model)
    assert not refused(model=model, placement=PlacementConfig(mode="colocated"), engine=EngineConfig(sleep_level=1))
