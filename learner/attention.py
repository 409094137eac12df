"""Exact attention over packed sequences: each attends to itself only, causally, with the kernels that every device has.

No kernel for variable lengths exists on CPUs, and a dense block mask would cost N² of the whole row. So the packed row
stays packed in
every other layer, and inside attention sequences of similar length are laid side by side: padding goes at the end,
where a causal kernel never lets a real token see it, so no mask is needed. Buckets bound the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "toolrl_packed"
FULL_ENOUGH = 0.7  # shortest over longest sequence of a bucket
SMALL_BUCKET_TOKENS = 2048  # below so many tokens a further kernel call costs more than padding


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences that are neighbours in the row: `rows` × `width` cells for their `tokens`."""

    tokens: int
    rows: int
    width: int
    cells: torch.Tensor | None  # [tokens] the cell of each token; None: all are equally long


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """How the sequences of a packed row lie."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> PackedLayout:
        """The layout of a row of sequences with these lengths."""
        buckets = []
        begin = 0
        for index in range(1, len(lengths) + 1):
            part = lengths[begin:index]
            if index < len(lengths):
                low, high = min(*part, lengths[index]), max(*part, lengths[index])
                if low >= FULL_ENOUGH * high or sum(part) < SMALL_BUCKET_TOKENS:
                    continue
            buckets.append(_bucket(part))
            begin = index
        return cls(tuple(buckets))

    def to(self, device: torch.device) -> PackedLayout:
        moved = (
            Bucket(b.tokens, b.rows, b.width, None if b.cells is None else b.cells.to(device)) for b in self.buckets
        )
        return PackedLayout(tuple(moved))


def _bucket(lengths: Sequence[int]) -> Bucket:
    width, total = max(lengths), sum(lengths)
    if min(lengths) == width:
        return Bucket(total, len(lengths), width, None)
    cells = torch.cat([torch.arange(size) + row * width for row, size in enumerate(lengths)])
    return Bucket(total, len(lengths), width, cells)


class _Spread(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """[n, H, D] tokens to their cells [rows · width, H, D], 0 elsewhere. Cells are unique, so the gradient is a plain
    gather."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, cells: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(cells)
        return tokens.new_zeros(size, *tokens.shape[1:]).index_copy_(0, cells, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Gather(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """The inverse of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, grid: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cells)
        ctx.size = grid.shape[0]
        return grid.index_select(0, cells)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0]
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, ctx.saved_tensors[0], grad), None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: PackedLayout,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """[1, N, H, D] from query [1, H, N, D] and key, value [1, H_kv, N, D]; called by transformers' attention layers."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    sizes = [bucket.tokens for bucket in packed_layout.buckets]
    tokens = [part[0].transpose(0, 1).split(sizes) for part in (query, key, value)]  # [n, H, D] each
    outputs = []
    for index, bucket in enumerate(packed_layout.buckets):
        parts = [part[index] for part in tokens]
        if bucket.cells is not None:
            cells, size = bucket.cells, bucket.rows * bucket.width
            parts = [_Spread.apply(part, cells, size) for part in parts]
        laid = [part.reshape(bucket.rows, bucket.width, *part.shape[1:]).transpose(1, 2) for part in parts]
        mask = _window(bucket.width, sliding_window, query.device)
        out = scaled_dot_product_attention(
            *laid, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout
        )
        flat = out.transpose(1, 2).reshape(bucket.rows * bucket.width, *out.shape[1:2], out.shape[3])
        outputs.append(flat if bucket.cells is None else _Gather.apply(flat, bucket.cells))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined[None], None


def _window(width: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    if sliding_window is None or sliding_window >= width:
        return None
    position = torch.arange(width, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < sliding_window)


AttentionInterface.register(NAME, packed_attention)
