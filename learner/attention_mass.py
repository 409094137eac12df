"""How much of the policy's attention goes to chosen tokens, a tool's result say, when it predicts what it says later.

Fused kernels return no attention weights. So while the packed row is read as ever, one layer's queries and keys are looked
at, and the weights computed again from them for the rows that predict policy tokens alone:

    a[h, q, k] = softmax_k(q_h · k_h · scale),   mass of a span = mean over later predictions q and heads h of Σ_{k in span} a

Cost: heads × policy tokens × tokens of a sequence once, in one layer, a piece of `ROWS` predictions at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from learner.packing import PackedBatch
from learner.sequence import TrainSequence

Spans = list[tuple[int, int]]  # [start, end) of response tokens
ROWS = 256  # predictions whose weights exist at once


class AttentionProbe:
    """Given to one forward pass over a batch whose sequences share nothing; `found` holds what it saw.

    Args:
        layer: index of the layer that is looked at.
        spans: for each sequence J sets of spans.
    """

    def __init__(
        self, layer: int, batch: PackedBatch, sequences: Sequence[TrainSequence], spans: Sequence[Sequence[Spans]]
    ) -> None:
        self.layer = layer
        self._sequence = None if batch.row_slice is None else batch.row_slice.sequence
        # Of each sequence [J, 2]: mass, and what it were if attention was spread evenly; NaN: nothing was seen.
        self.found: list[np.ndarray] = []
        self._places: list[tuple[slice, torch.Tensor]] = []  # of each sequence: its tokens in the row, its predictions
        self._chosen: list[torch.Tensor] = []  # [T, J] 1 where a token is in a set of spans
        if not sequences:
            return
        device = batch.head_rows.device
        predictions = batch.head_rows.split([int(sequence.policy_mask.sum()) for sequence in sequences])
        ends = zip(batch.layout.starts, batch.layout.starts[1:], strict=False)
        for sequence, rows, wanted, (start, end) in zip(sequences, predictions, spans, ends, strict=True):
            chosen = torch.zeros(end - start, len(wanted))
            for index, each in enumerate(wanted):
                for first, last in each:
                    chosen[sequence.prompt_length + first : sequence.prompt_length + last, index] = 1
            self._places.append((slice(start, end), rows - start))
            self._chosen.append(chosen.to(device))

    def see(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> None:
        """Called by every attention layer with its query [1, H, N, D] and key [1, H_kv, N, D]; collective over the ranks of the
        row."""
        if getattr(module, "layer_idx", None) != self.layer:
            return
        dtype = torch.promote_types(query.dtype, torch.float32)
        repeats = query.shape[1] // key.shape[1]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        for (tokens, predictions), chosen in zip(self._places, self._chosen, strict=True):
            keys = key[0, :, tokens].detach().to(dtype).repeat_interleave(repeats, dim=0)
            queries = query[0, :, tokens].detach().to(dtype)
            masses = [
                _weights(queries[:, rows], keys, rows, scale, window).mean(0) @ chosen.to(dtype)
                for rows in predictions.split(ROWS)
            ]
            mass = torch.cat(masses)
            if self._sequence is not None:  # each rank of the row has other heads, and as many
                mass = self._sequence.mean(mass)
            self.found.append(_means(mass, predictions, chosen))


def _weights(
    queries: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """[H, P, T] attention weights of the queries [H, P, D] that stand in the rows [P]."""
    place = torch.arange(keys.shape[1], device=keys.device)
    distance = rows[:, None] - place
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores: Any = (queries @ keys.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1)


def _means(masses: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor) -> np.ndarray:
    """[J, 2] over the predictions behind each set of spans, from their masses [P, J]."""
    place = torch.arange(1, len(chosen) + 1, device=chosen.device)[:, None]
    ends = (chosen * place).amax(0)  # [J] the first token behind each set; 0: the set is empty
    later = (rows[:, None] >= ends) & (ends > 0)
    evenly = chosen.sum(0) / (rows[:, None] + 1)
    count = later.sum(0)  # 0: nothing is predicted behind it, and 0 / 0 says so
    found = [torch.where(later, part, 0).sum(0) / count for part in (masses.float(), evenly)]
    means: np.ndarray = torch.stack(found, dim=1).cpu().numpy()
    return means
