"""Exact attention over a packed row: each segment attends causally to itself and fully to the segments it continues.

No kernel for variable lengths exists on CPUs, and a dense block mask would cost N² of the whole row. So the packed row
stays packed in every other layer, and inside attention it is taken apart (`learner/layout.py`):

- Segments of similar length are laid side by side; padding goes at the end, where a causal kernel never lets a real
  token see it, so no mask is needed.
- All tokens that continue a shared segment stand together, and attend to its keys in one call without a mask and
  without a copy of the keys.

The parts are softmaxes over disjoint keys; with their log-normalisers l_i they join exactly:

    l = log Σ exp(l_i),   out = Σ exp(l_i − l) · out_i

and the backward pass of each part, given `out` and `l` of the whole instead of its own, gives its part of the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from learner.attention_mass import AttentionProbe
from learner.layout import Bucket, PackedLayout
from learner.masked_attention import masked_attention
from learner.row_slices import RowSlice

NAME = "toolrl_packed"

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
    row_slice: RowSlice | None = None,
    attention_probe: AttentionProbe | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """[1, N, H, D] from query [1, H, N, D] and key, value [1, H_kv, N, D]; called by transformers' attention layers.

    With a `row_slice` the tokens that come and go are this rank's alone, and the call is collective.

    Raises:
        ValueError: the model drops attention weights at random; ratios of probabilities need the same function twice.
    """
    if dropout:
        raise ValueError(f"attention_dropout is {dropout}; set it to 0 in the model's config.json")
    if row_slice is not None:
        options = {"scaling": scaling, "packed_layout": packed_layout, "sliding_window": sliding_window}
        found: tuple[torch.Tensor, None] = row_slice.sequence.attend(
            packed_attention, module, query, key, value, attention_probe=attention_probe, **options
        )
        return found
    if attention_probe is not None:
        attention_probe.see(module, query, key, scaling, sliding_window)
    tokens = [part[0].transpose(0, 1) for part in (query, key, value)]
    if query.device.type == "cpu":
        return _JoinedAttention.apply(*tokens, packed_layout, scaling, sliding_window)[None], None
    query, key, value = tokens
    return masked_attention(query, key, value, packed_layout, scaling, sliding_window)[None], None


class _JoinedAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """[N, H, D] from query [N, H, D] and key, value [N, H_kv, D] with the CPU's flash kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        outputs, normalizers, saved = [], [], []
        for bucket in layout.buckets:
            laid = [bucket.lay(part).transpose(1, 2) for part in (query, key, value)]
            mask = _within(bucket, window, query)
            out, normalizer = _forward(*laid, 0.0, mask is None, attn_mask=mask, scale=scale)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            normalizers.append(normalizer.transpose(1, 2).flatten(0, 1))
            saved += laid
        joined, log_total = layout.gather(outputs), layout.gather(normalizers)
        for span in layout.spans:
            shared, later = slice(span.begin, span.end), slice(span.end, span.reach)
            parts = (_rows(query[later]), _rows(key[shared]), _rows(value[shared]))
            out, normalizer = _forward(*parts, attn_mask=_across(layout, span, window, query), scale=scale)
            out, normalizer = out[0].transpose(0, 1), normalizer[0].transpose(0, 1)
            total = torch.logaddexp(log_total[later], normalizer)
            joined[later] *= (log_total[later] - total).exp_().to(out.dtype)[..., None]
            joined[later].addcmul_(out, (normalizer - total).exp_().to(out.dtype)[..., None])
            log_total[later] = total
        if layout.spans:
            saved += (query, key, value)
        ctx.save_for_backward(joined, log_total, *saved)
        ctx.layout, ctx.scale, ctx.window, ctx.repeats = layout, scale, window, repeats
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        joined, log_total, *saved = ctx.saved_tensors
        layout, scale, window, grad = ctx.layout, ctx.scale, ctx.window, grads[0].contiguous()
        found: tuple[list[torch.Tensor], ...] = ([], [], [])
        for index, bucket in enumerate(layout.buckets):
            laid = saved[3 * index : 3 * index + 3]
            mask = _within(bucket, window, joined)
            normalizer = bucket.lay(log_total)
            if bucket.padding is not None:  # a weight of exp(-inf): nothing flows through padding
                normalizer.flatten(0, 1).index_fill_(0, bucket.padding, torch.inf)
            slopes = _backward(
                bucket.lay(grad).transpose(1, 2),
                *laid,
                bucket.lay(joined).transpose(1, 2),
                normalizer.transpose(1, 2),
                0.0,
                mask is None,
                attn_mask=mask,
                scale=scale,
            )
            for into, slope in zip(found, slopes, strict=True):
                into.append(slope.transpose(1, 2).flatten(0, 1))
        totals = [layout.gather(parts) for parts in found]
        for span in layout.spans:
            shared, later = slice(span.begin, span.end), slice(span.end, span.reach)
            query, key, value = saved[-3:]
            slopes = _backward(
                _rows(grad[later]),
                *(_rows(query[later]), _rows(key[shared]), _rows(value[shared]), _rows(joined[later])),
                log_total[later].transpose(0, 1)[None],
                0.0,
                False,
                attn_mask=_across(layout, span, window, joined),
                scale=scale,
            )
            for total, where, slope in zip(totals, (later, shared, shared), slopes, strict=True):
                total[where] += slope[0].transpose(0, 1)
        if ctx.repeats > 1:
            totals[1:] = [total.unflatten(1, (-1, ctx.repeats)).sum(2) for total in totals[1:]]
        return *totals, None, None, None


def _rows(tokens: torch.Tensor) -> torch.Tensor:
    """[1, H, n, D] from [n, H, D]."""
    return tokens.transpose(0, 1)[None]


def _within(bucket: Bucket, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
    if window is None or window >= bucket.width:
        return None
    position = torch.arange(bucket.width)
    distance = position[:, None] - position[None, :]
    return _hide((distance < 0) | (distance >= window), like)


def _across(layout: PackedLayout, span: Any, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
    later, shared = layout.positions[span.end : span.reach], layout.positions[span.begin : span.end]
    if window is None or int(later.max() - shared[0]) < window:
        return None
    return _hide(later[:, None] - shared[None, :] >= window, like)


def _hide(hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """An additive mask. Finite, so that a row that sees nothing has a log-normaliser that weighs nothing, not a NaN."""
    lowest = torch.finfo(like.dtype).min / 2
    return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, lowest)


AttentionInterface.register(NAME, packed_attention)
