"""Loading for ZeRO-3: the model is split over the ranks from its first weight on, so it may be larger than one rank's
memory.

Invariant: no rank ever holds more than one whole parameter (and the parameters below DeepSpeed's persistence threshold).
Rank 0 reads the safetensors files, one tensor at a time, and hands it out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from learner.gathering import writable


def load_partitioned(model_dir: Path, settings: dict[str, Any], **options: Any) -> torch.nn.Module:
    """The causal language model of a folder; collective. `settings` is DeepSpeed's config, `options` go to transformers.

    Raises:
        ValueError: the folder has no safetensors files, or its tensors are not the model's by name and shape.
    """
    import deepspeed

    trust = {"trust_remote_code": options.get("trust_remote_code", False)}
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, **trust)
    with deepspeed.zero.Init(config_dict_or_path=settings), no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()
    stored = _stored(model_dir)
    wanted = dict(model.named_parameters())
    _check(model_dir, stored, model)
    # Few files hold many tensors each: opened once, in the order of the model.
    files: dict[Path, Any] = {path: safe_open(path, framework="pt") for path in set(stored.values())}
    for name, parameter in wanted.items():
        with writable(parameter) as mine:
            if mine:
                parameter.data.copy_(files[stored[name]].get_tensor(name))
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.copy_(files[stored[name]].get_tensor(name))
    done: torch.nn.Module = model.eval()
    return done


def _stored(model_dir: Path) -> dict[str, Path]:
    """{tensor: file} of the folder."""
    stored = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            stored.update(dict.fromkeys(file.keys(), path))
    return stored


def _check(model_dir: Path, stored: dict[str, Path], model: torch.nn.Module) -> None:
    wanted = {name for name, _ in model.named_parameters()}
    if missing := sorted(wanted - stored.keys()):
        what = f"lacks {len(missing)} of its tensors: {', '.join(missing[:3])}" if stored else "has no safetensors file"
        raise ValueError(
            f"model {model_dir} {what}; for learner.zero_stage=3 save it with `save_pretrained` of this transformers "
            "version, or use zero_stage 0 to 2"
        )
    # Tied weights may be stored under both names.
    known = wanted | {name for name, _ in model.named_buffers()} | set(getattr(model, "all_tied_weights_keys", {}))
    if extra := sorted(stored.keys() - known):
        raise ValueError(
            f"model {model_dir} holds {len(extra)} tensors that {type(model).__name__} does not know: {', '.join(extra[:3])}"
        )
