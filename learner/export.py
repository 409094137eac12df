"""Export to a Hugging Face folder: weights as safetensors, config, and the tokenizer's files as they came."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from learner.weight_source import WeightSource

# Written by `save_pretrained`, or weights under another name: everything else of the source folder is the tokenizer's.
NOT_COPIED = {"config.json", "generation_config.json"}
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def export_hf(model: Any, source: WeightSource, model_dir: Path, folder: Path, rank: int) -> None:
    """Writes `folder` on rank 0 (collective: gathering is); config and tokenizer came from `model_dir`."""
    weights = {}
    for name, tensor in source:
        if rank == 0:
            weights[name] = tensor.to("cpu", copy=True)
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(model_dir.iterdir()):
            if file.is_file() and file.name not in NOT_COPIED and not file.name.endswith(WEIGHT_SUFFIXES):
                shutil.copy2(file, folder / file.name)
        model.save_pretrained(folder, state_dict=weights)
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()
