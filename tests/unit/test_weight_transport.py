"""Which transport `auto` is, and which are refused before anything starts."""

from __future__ import annotations

import pytest

from toolrl import presets
from toolrl.config_checks import problems
from toolrl.errors import ConfigError
from toolrl.weight_transport import transport_of


@pytest.mark.parametrize(
    ("settings", "device", "transport"),
    [
        ([], "cpu", "shared_memory"),
        ([], "cuda", "nccl"),
        (["model.lora.rank=8"], "cuda", "nccl"),
        (["model.lora.rank=8", "model.lora.publish=adapter"], "cuda", "shared_memory"),
        (["weights.transport=gloo"], "cuda", "gloo"),
        (["weights.transport=shared_memory"], "cuda", "shared_memory"),
    ],
)
def test_auto_is_chosen_by_device_and_what_is_published(settings: list[str], device: str, transport: str) -> None:
    assert transport_of(presets.load("math-4b", settings), device) == transport  # type: ignore[arg-type]


def test_auto_is_ipc_where_an_engine_shares_the_learners_gpu() -> None:
    config = presets.load("single-gpu-1.5b", [])
    assert config.placement.mode == "colocated"
    assert transport_of(config, "cuda") == "ipc"
    assert transport_of(config, "cpu") == "shared_memory"


@pytest.mark.parametrize(
    ("preset", "setting", "message"),
    [
        ("math-4b", "ipc", "inside one GPU"),
        ("single-gpu-1.5b", "nccl", "two processes on one GPU"),
        ("quickstart-cpu", "nccl", "set auto, or gloo"),
        ("quickstart-cpu", "ipc", "set auto, or gloo"),
    ],
)
def test_what_cannot_be_is_refused_before_the_start(preset: str, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        presets.load(preset, [f"weights.transport={setting}"])


@pytest.mark.parametrize("transport", ["gloo", "nccl", "ipc"])
def test_a_bare_adapter_goes_through_memory_only(transport: str) -> None:
    with pytest.raises(ConfigError, match="sends whole weights"):
        presets.load("math-4b", ["model.lora.rank=8", "model.lora.publish=adapter", f"weights.transport={transport}"])


@pytest.mark.parametrize("preset", ["quickstart-cpu", "math-4b", "single-gpu-1.5b"])
def test_gloo_goes_everywhere(preset: str) -> None:
    found = problems(presets.load(preset, ["weights.transport=gloo"]))
    assert not [problem for problem in found if problem.key == "weights.transport"]
