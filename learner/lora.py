"""Low-rank adapters in the policy, by peft: what is trained, what the engines get, what is saved.

    y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ,  s = alpha / rank,  A [rank, in] random, B [out, rank] 0 at the start

Invariants:
- W is never changed, so the model without its adapter is the model that was loaded: the reference of a KL term needs
  no second model.
- `merged` is W + s·B·A in float32, rounded once to W's type: the same bits each time, and W itself while B is 0.
- No dropout: the same tokens have the same log-probabilities in every pass.

Source: Hu et al. 2021, "LoRA". Trap: in bfloat16 the merged weight keeps 8 bits of a small update, so the engine's
log-probabilities stand further from the learner's than those of full training do; the correction for that gap sees it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from toolrl.config import LoraConfig

TRAINED, REFERENCE = "default", "reference"  # adapters by peft's name; the first is also the one that peft expects
_PIECES = (".lora_A.", ".lora_B.")


def add_adapter(causal_lm: Any, config: LoraConfig, *, seed: int, reference: bool) -> None:
    """Puts the adapter into the model, in place, and freezes everything else.

    `reference` adds a second one that is never trained: what the policy was when its reference was last frozen.

    Raises:
        ValueError: settings that cannot be exact, or target modules that the model lacks or that are not linear.
        ImportError: peft is not installed.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    if config.dropout:
        raise ValueError(
            f"model.lora.dropout is {config.dropout}; it must be 0: with dropout the same tokens have other "
            "log-probabilities in each pass, and importance ratios are no longer 1 on fresh data"
        )
    targets = list(config.target_modules)
    settings: dict[str, Any] = {  # untyped: peft says alpha is an int, and computes with any number
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": "all-linear" if targets == ["all-linear"] else targets,
        "task_type": "CAUSAL_LM",
    }
    for name in (TRAINED, REFERENCE) if reference else (TRAINED,):
        wanted = PeftConfig(**settings)
        # The draw is the same however the model was loaded, and does not move the run's own random numbers.
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # two adapters are meant
            torch.manual_seed(seed)
            inject_adapter_in_model(wanted, causal_lm, name)
    for module, layer in layers(causal_lm).items():
        if not isinstance(layer.get_base_layer(), torch.nn.Linear):
            kind = type(layer.get_base_layer()).__name__
            raise ValueError(f"model.lora.target_modules: {module} is a {kind}; only linear layers can be adapted")
    for name, parameter in causal_lm.named_parameters():
        parameter.requires_grad_(adapter_of(name) == TRAINED)
    select(causal_lm, TRAINED)


def layers(causal_lm: Any) -> dict[str, Any]:
    """peft's layers by the name of the module that they adapt; empty without an adapter."""
    return {
        name: module for name, module in causal_lm.named_modules() if hasattr(module, "lora_A") and len(module.lora_A)
    }


def adapter_of(name: str) -> str | None:
    """Which adapter the parameter of this name belongs to; None: the model itself."""
    for piece in _PIECES:
        if piece in name:
            return name.split(piece)[1].split(".")[0]
    return None


def hf_name(name: str) -> str:
    """The Hugging Face name of a parameter of the model itself: an adapted layer's weight lies one level deeper."""
    return name.replace(".base_layer.", ".")


def pieces(layer: Any, adapter: str) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """(A [rank, in], B [out, rank])."""
    return layer.lora_A[adapter].weight, layer.lora_B[adapter].weight


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """[out, in] W + scale·B·A; see the module."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)


def select(causal_lm: Any, adapter: str | None) -> None:
    """Which adapter takes part from now on; None: the model as it was loaded."""
    for layer in layers(causal_lm).values():
        # peft's own `set_adapter` and `enable_adapters` also decide which weights are trained, behind DeepSpeed's back.
        layer._active_adapter = [adapter or TRAINED]
        layer._disable_adapters = adapter is None


@contextlib.contextmanager
def selected(causal_lm: Any, adapter: str | None) -> Iterator[None]:
    """`select` for as long as the block lasts."""
    select(causal_lm, adapter)
    try:
        yield
    finally:
        select(causal_lm, TRAINED)


def peft_settings(config: LoraConfig, causal_lm: Any, base: str) -> dict[str, Any]:
    """The content of `adapter_config.json`, as peft and vLLM read it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in layers(causal_lm)}),
        "inference_mode": True,
    }


def peft_name(name: str) -> str:
    """A parameter's name in `adapter_model.safetensors`."""
    return f"base_model.model.{name}".replace(f".{TRAINED}.weight", ".weight").replace(
        f".{REFERENCE}.weight", ".weight"
    )


def adapter_parameters(causal_lm: Any, adapter: str = TRAINED) -> Mapping[str, torch.nn.Parameter]:
    """The adapter's own parameters by the model's names."""
    return {name: each for name, each in causal_lm.named_parameters() if adapter_of(name) == adapter}
