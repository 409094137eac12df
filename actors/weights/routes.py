"""Which tensors of a publication make up which weight of a model: learned from one load by vLLM, then followed without it.

vLLM loads weights layer by layer through Python code for every tensor, and copies the parts of a fused weight together before
it packs that. Where a layer's weight is nothing but tensors of the publication one below the other, the layer's own packing
can read them from where they lie.

Invariants:
- A route is taken only where it was proven: after a load by vLLM, with the very tensors, the weight equalled them, and no
  other order of them. What a loader does besides placing rows (another order, a sum, a slice) fails the proof.
- Every tensor has a route, or there are none: the model is then loaded by vLLM each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


class NoRoute(Exception):
    """The weights are to be loaded by vLLM."""


@dataclass
class Routes:
    """Learned from one publication, for those with the same tensors."""

    packed: dict[str, list[str]] = field(default_factory=dict)  # module: tensors one below the other, in this order
    copied: list[str] = field(default_factory=list)  # parameters that are a tensor of the same name
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)

    def fit(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == self.shapes


def rows_of(weight: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of `parts` in the order in which they make up `weight`'s rows.

    Raises:
        NoRoute: they do not, or two of them could change places.
    """
    if any(part.dtype != weight.dtype or part.ndim != weight.ndim for part in parts.values()):
        raise NoRoute
    order, row = [], 0
    rest = dict(parts)
    while rest:
        fitting = [
            name
            for name, part in rest.items()
            if part.shape[1:] == weight.shape[1:]
            and row + len(part) <= len(weight)
            and torch.equal(weight[row : row + len(part)], part)
        ]
        if len(fitting) != 1:
            raise NoRoute
        order.append(fitting[0])
        row += len(rest.pop(fitting[0]))
    if row != len(weight):
        raise NoRoute
    return order


def together(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts one below the other; a view where they lie so in memory."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(parts)
        end += part.nbytes
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
