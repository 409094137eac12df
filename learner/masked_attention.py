"""The same attention with public kernels and boolean masks, for devices whose kernels return no log-normaliser.

A segment's queries see [the keys of the segments it continues ; its own]: the former are gathered for each segment, and
a mask [rows, 1, width, context + width] says which cells count. Segments that continue nothing need no mask.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from learner.layout import Bucket, PackedLayout


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """[N, H, D] from query [N, H, D] and key, value [N, H_kv, D]."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    outputs = []
    for bucket in layout.buckets:
        keys, mask = _visible(bucket, layout, window)
        if keys is None:
            laid = [bucket.lay(part).transpose(1, 2) for part in (query, key, value)]
        else:
            seen = [part.index_select(0, keys).unflatten(0, (bucket.rows, -1)) for part in (key, value)]
            laid = [part.transpose(1, 2) for part in (bucket.lay(query), *seen)]
        out = scaled_dot_product_attention(*laid, attn_mask=mask, is_causal=mask is None, scale=scale)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return layout.gather(outputs)


def _visible(
    bucket: Bucket, layout: PackedLayout, window: int | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(tokens [rows · (context + width)] to gather as keys, mask); None where the bucket's own cells do, causally."""
    contexts = [_context(segment, layout) for segment in bucket.segments]
    longest = max(len(context) for context in contexts)
    device = layout.positions.device
    own = torch.arange(bucket.width, device=device)
    distance = own[:, None] - own[None, :]
    if longest == 0:
        if window is None or window >= bucket.width:
            return None, None
        return None, (distance >= 0) & (distance < window)
    padded = torch.full((bucket.rows, longest), -1)
    for row, context in enumerate(contexts):
        padded[row, : len(context)] = context
    before = padded.to(device)
    mine = bucket.lay(torch.arange(len(layout.positions), device=device))
    keys = torch.cat([before.clamp(min=0), mine], dim=1)
    sees = (distance >= 0).expand(bucket.rows, -1, -1)
    ahead = (before >= 0)[:, None, :].expand(-1, bucket.width, -1)
    mask = torch.cat([ahead, sees], dim=2)
    if window is not None:
        # By cell, not by token: padding must see itself at least, or its softmax would be empty.
        place = layout.positions[mine[:, :1]] + own
        at = torch.cat([layout.positions[before.clamp(min=0)], place], dim=1)
        mask = mask & (place[:, :, None] - at[:, None, :] < window)
    return keys.flatten(), mask[:, None]


def _context(segment: int, layout: PackedLayout) -> torch.Tensor:
    """The tokens of the segments that this one continues, first to last."""
    found = []
    at = layout.parents[segment]
    while at >= 0:
        found.append(torch.arange(layout.starts[at], layout.starts[at + 1]))
        at = layout.parents[at]
    return torch.cat(found[::-1]) if found else torch.zeros(0, dtype=torch.long)
