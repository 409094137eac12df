"""Export to a Hugging Face folder: weights as safetensors (an adapter merged into them), config, the tokenizer's files as they
came, and the adapter by itself in `adapter/`, as peft and vLLM load it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from learner import lora
from learner.weight_source import AdapterSource, WeightSource
from toolrl.config import LoraConfig

ADAPTER = "adapter"
# Written by `save_pretrained`, or weights under another name: everything else of the source folder is the tokenizer's.
NOT_COPIED = {"config.json", "generation_config.json"}
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def export_hf(model: Any, source: WeightSource, model_dir: Path, folder: Path, rank: int, adapter: LoraConfig) -> None:
    """Writes `folder` on rank 0 (collective: gathering is); config and tokenizer came from `model_dir`."""
    weights = _on_rank_0(source, rank)
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(model_dir.iterdir()):
            if file.is_file() and file.name not in NOT_COPIED and not file.name.endswith(WEIGHT_SUFFIXES):
                shutil.copy2(file, folder / file.name)
        model.save_pretrained(folder, state_dict=weights)
    if adapter.rank:
        own = _on_rank_0(AdapterSource(model), rank)
        if rank == 0:
            write_adapter(folder / ADAPTER, own, lora.peft_settings(adapter, model, str(model_dir)))
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    """A folder that `PeftModel.from_pretrained` and vLLM's `LoRARequest` take."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _on_rank_0(source: Iterable[tuple[str, torch.Tensor]], rank: int) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in source:
        if rank == 0:
            found[name] = tensor.to("cpu", copy=True).contiguous()
    return found
