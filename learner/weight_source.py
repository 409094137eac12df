"""The learner's weights as a stream of (Hugging Face name, whole tensor), whatever ZeRO stage holds them.

Shaped as vLLM's `WeightSource`: re-iterable, with `metadata()` that agrees with iteration element for element. Order
is that of the module's parameters, tied weights once. A weight with an adapter comes merged, under its own name; the
adapter's parameters do not come. Under ZeRO-3 iteration gathers one weight at a time, so all ranks must iterate
together; a tensor is valid until the next one is asked for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from learner import lora
from learner.gathering import whole, whole_shape


@dataclass(frozen=True, slots=True)
class ParameterMeta:
    """Name, type and full shape of one weight."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """Over a transformers model, DeepSpeed-partitioned or not, with an adapter or without."""

    def __init__(self, model: torch.nn.Module, *, base: bool = False) -> None:
        self._model = model
        self._base = base  # without the adapter: the weights as they were loaded

    def metadata(self) -> list[ParameterMeta]:
        """What iteration will yield; gathers nothing."""
        return [
            ParameterMeta(lora.hf_name(name), parameter.dtype, whole_shape(parameter))
            for name, parameter in self._parameters()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        adapted: dict[str, Any] = {} if self._base else lora.layers(self._model)
        for name, parameter in self._parameters():
            layer = adapted.get(name.removesuffix(".base_layer.weight"))
            if layer is None:
                with whole([parameter]):
                    yield lora.hf_name(name), parameter.detach()
                continue
            a, b = lora.pieces(layer, lora.TRAINED)
            with whole([parameter, a, b]), torch.no_grad():
                weight = lora.merged(parameter, a, b, layer.scaling[lora.TRAINED])
            yield lora.hf_name(name), weight

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, each) for name, each in self._model.named_parameters() if lora.adapter_of(name) is None)

    def nbytes(self) -> int:
        """Of all weights; gathers nothing."""
        return sum(meta.dtype.itemsize * math.prod(meta.shape) for meta in self.metadata())

    def checksums(self) -> dict[str, str]:
        """Name -> `checksum` of every weight; collective as iteration is."""
        return {name: checksum(tensor) for name, tensor in self}


class AdapterSource:
    """One adapter of the model as such a stream, under peft's names."""

    def __init__(self, model: torch.nn.Module, adapter: str = lora.TRAINED) -> None:
        self._parameters = lora.adapter_parameters(model, adapter)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters.items():
            with whole([parameter]):
                yield lora.peft_name(name), parameter.detach()


def checksum(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of the tensor's bytes in row-major order; equal on every machine for equal values and type."""
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(memoryview(data.numpy())).hexdigest()
