"""A bare adapter before it reaches an engine: what is refused, what an engine begins with, what vLLM is started with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.requirements import need

need("torch", "safetensors")

import torch
from safetensors import safe_open

from actors.engine_setup import adapter_arguments, engine_arguments, served_adapter
from actors.weights.publication import TensorRecord
from actors.weights.served_adapter import check_adapter, laid_out, untrained
from actors.weights.verification import Refused
from toolrl.config import EngineConfig, LoraConfig

MODEL = {
    "model.embed_tokens.weight": (32, 8),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 16),
    "model.layers.0.norm.weight": (8,),
    "lm_head.weight": (32, 8),
}
QUERY, OUTPUT = (f"base_model.model.model.layers.0.self_attn.{name}" for name in ("q_proj", "o_proj"))


def records(**shapes: tuple[int, ...]) -> list[TensorRecord]:
    return [TensorRecord(name.replace("__", "."), "float32", shape, 0, 0, 4, "") for name, shape in shapes.items()]


def pair(module: str, a: tuple[int, ...], b: tuple[int, ...]) -> list[TensorRecord]:
    return records(**{f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b})


def test_pairs_that_fit_weights_of_the_model_are_an_adapter() -> None:
    check_adapter([*pair(QUERY, (4, 8), (16, 4)), *pair(OUTPUT, (4, 16), (8, 4))], MODEL, 4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (pair(QUERY, (4, 8), (16, 4))[:1], "one of A and B only"),
        (pair(QUERY, (4, 16), (16, 4)), r"lora_A\.weight has shape \[4, 16\], it must be \[4, 8\]"),
        (pair(QUERY, (4, 8), (4, 16)), r"lora_B\.weight has shape \[4, 16\], it must be \[16, 4\]"),
        (pair(QUERY.replace("layers.0", "layers.1"), (4, 8), (16, 4)), "a weight that the model folder does not have"),
        (pair("base_model.model.model.layers.0.norm", (4, 8), (8, 4)), "a weight that the model folder does not have"),
        (records(**{"model.embed_tokens.weight": (32, 8)}), "is no tensor of an adapter"),
        (records(**{f"{QUERY}.lora_magnitude_vector": (16,)}), "is no tensor of an adapter"),
        (records(**{f"{QUERY}.lora_A.bias": (16,)}), "is no tensor of an adapter"),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused(wrong: list[TensorRecord], message: str) -> None:
    with pytest.raises(Refused, match=message):
        check_adapter(wrong, MODEL, 4)


@pytest.mark.parametrize(
    ("targets", "modules"),
    [(["all-linear"], {"q_proj", "o_proj"}), (["q_proj"], {"q_proj"}), (["layers.0.self_attn.o_proj"], {"o_proj"})],
)
def test_an_engine_begins_with_an_adapter_of_the_run_s_kind_that_changes_nothing(
    targets: list[str], modules: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, settings = untrained(MODEL, LoraConfig(rank=4, alpha=6.0, target_modules=targets))
    assert set(settings["target_modules"]) == modules and (settings["r"], settings["lora_alpha"]) == (4, 6.0)
    assert not any(tensor.any() for tensor in tensors.values())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_adapter(records(**shapes), MODEL, 4)
    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors} == modules
    views = torch.arange(32.0).split(8)  # as tensors lie in a bucket: neighbours in one memory
    with laid_out({f"t{k}": view for k, view in enumerate(views)}, settings) as folder:
        assert json.loads((folder / "adapter_config.json").read_text()) == settings
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as content:
            assert all(torch.equal(content.get_tensor(f"t{k}"), view) for k, view in enumerate(views))
    assert not folder.exists()


def test_only_an_engine_that_is_published_adapters_is_started_for_them() -> None:
    lora = LoraConfig(rank=9)
    assert served_adapter(lora) is None and served_adapter(replace(lora, rank=0, publish="adapter")) is None
    asked = served_adapter(replace(lora, publish="adapter", target_modules=["self_attn.q_proj", "o_proj"]))
    assert asked is not None
    told = adapter_arguments(asked)
    assert told["max_lora_rank"] == 16 and told["lora_target_modules"] == ["o_proj", "q_proj"]

    def arguments(adapter: LoraConfig | None) -> dict[str, object]:
        return engine_arguments(
            "m", EngineConfig(), device="cpu", dtype="float32", max_context_tokens=64, seed=0,
            transport="shared_memory", adapter=adapter,
        )  # fmt: skip

    assert told.items() <= arguments(asked).items() and "enable_lora" not in arguments(None)
