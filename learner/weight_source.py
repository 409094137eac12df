"""The learner's weights as a stream of (Hugging Face name, whole tensor), whatever ZeRO stage holds them.

Shaped as vLLM's `WeightSource`: re-iterable, with `metadata()` that agrees with iteration element for element. Order
is that of the module's parameters, tied weights once. Under ZeRO-3 iteration gathers one parameter at a time, so all
ranks must iterate together; a tensor is valid until the next one is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ParameterMeta:
    """Name, type and full shape of one weight."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """Over a transformers model, DeepSpeed-partitioned or not."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def metadata(self) -> list[ParameterMeta]:
        """What iteration will yield; gathers nothing."""
        return [
            ParameterMeta(name, parameter.dtype, tuple(getattr(parameter, "ds_shape", parameter.shape)))
            for name, parameter in self._model.named_parameters()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            if hasattr(parameter, "ds_id"):
                import deepspeed

                with deepspeed.zero.GatheredParameters([parameter]):
                    yield name, parameter.detach()
            else:
                yield name, parameter.detach()

    def checksums(self) -> dict[str, str]:
        """Name -> `checksum` of every weight; collective as iteration is."""
        return {name: checksum(tensor) for name, tensor in self}


def checksum(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of the tensor's bytes in row-major order; equal on every machine for equal values and type."""
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(memoryview(data.numpy())).hexdigest()
