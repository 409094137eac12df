"""A micro-batch as the model reads it: sequences end to end in one row without padding, and the grid [B, R] its losses
live on.

Positions restart at every sequence. Only what a loss needs is computed: tokens after a sequence's last policy token
are left out, and only positions that predict a policy token go through the head. An empty share becomes one token
whose loss weighs 0, so that its rank takes part in every collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from learner.attention import PackedLayout
from learner.sequence import TrainSequence


@dataclass(slots=True)
class PackedBatch:
    """B sequences, N model tokens, M predicted policy tokens, R the longest response."""

    input_ids: torch.Tensor  # [1, N]
    position_ids: torch.Tensor  # [1, N]
    layout: PackedLayout
    head_rows: torch.Tensor  # [M] where in the row a policy token is predicted
    targets: torch.Tensor  # [M] that token
    inverse_temperature: torch.Tensor | None  # [M] float32; None: 1 everywhere
    cells: torch.Tensor  # [M] its place in the flat grid
    policy_mask: torch.Tensor  # [B, R] bool
    loss_mask: torch.Tensor  # [B, R] bool
    rollout_logp: torch.Tensor  # [B, R] float32
    advantages: torch.Tensor  # [B, R] float32
    turn_ids: torch.Tensor  # [B, R] int64
    head_pieces: int = 1  # into at least so many pieces the head's rows are cut: as many as on the rank with most rows

    def grid(self, values: torch.Tensor) -> torch.Tensor:
        """[B, R] from [M], 0 where no policy token is; the gradient flows."""
        flat = values.new_zeros(self.policy_mask.numel())
        return flat.index_copy(0, self.cells, values).view(self.policy_mask.shape)

    def on(self, device: torch.device) -> PackedBatch:
        """The same batch on `device`."""
        if device.type == "cpu":
            return self
        moved = {name: getattr(self, name) for name in self.__slots__}
        for name, value in moved.items():
            if isinstance(value, torch.Tensor | PackedLayout):
                moved[name] = value.to(device)
        return PackedBatch(**moved)


def pack(sequences: Sequence[TrainSequence]) -> PackedBatch:
    """The packed batch of these sequences (longest first packs best); see the module for the empty one."""
    if not sequences:
        return _empty()
    ends = [int(np.flatnonzero(sequence.policy_mask)[-1]) for sequence in sequences]
    used = [sequence.prompt_length + end for sequence, end in zip(sequences, ends, strict=True)]
    starts = np.concatenate([[0], np.cumsum(used)[:-1]])
    width = max(ends) + 1
    masks = [sequence.policy_mask[: end + 1] for sequence, end in zip(sequences, ends, strict=True)]
    picked = [np.flatnonzero(mask) for mask in masks]
    first = [start + sequence.prompt_length - 1 for start, sequence in zip(starts, sequences, strict=True)]
    rows = np.concatenate([base + where for base, where in zip(first, picked, strict=True)])
    cells = np.concatenate([index * width + where for index, where in enumerate(picked)])
    targets = np.concatenate(
        [sequence.token_ids[sequence.prompt_length + where] for sequence, where in zip(sequences, picked, strict=True)]
    )
    inputs = np.concatenate([sequence.token_ids[:size] for sequence, size in zip(sequences, used, strict=True)])
    temperatures = np.asarray([sequence.temperature for sequence in sequences], dtype=np.float32)
    scale = None
    if (temperatures != 1).any():
        scale = torch.from_numpy(np.repeat(1 / temperatures, [len(where) for where in picked]))
    return PackedBatch(
        input_ids=torch.from_numpy(inputs).long()[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(size) for size in used]))[None],
        layout=PackedLayout.of(used),
        head_rows=torch.from_numpy(rows),
        targets=torch.from_numpy(targets).long(),
        inverse_temperature=scale,
        cells=torch.from_numpy(cells),
        policy_mask=_grid([sequence.policy_mask for sequence in sequences], width, bool, False),
        loss_mask=_grid([sequence.loss_mask for sequence in sequences], width, bool, False),
        rollout_logp=_grid([sequence.rollout_logp for sequence in sequences], width, np.float32, 0.0),
        advantages=_grid([sequence.advantages for sequence in sequences], width, np.float32, 0.0),
        turn_ids=_grid([sequence.turn_ids for sequence in sequences], width, np.int64, -1),
    )


def model_tokens(sequence: TrainSequence) -> int:
    """Tokens that the model reads for this sequence: what a micro-batch's cap counts."""
    return sequence.prompt_length + int(np.flatnonzero(sequence.policy_mask)[-1])


def _grid(rows: Sequence[np.ndarray], width: int, dtype: type, fill: float) -> torch.Tensor:
    grid: np.ndarray = np.full((len(rows), width), fill, dtype=dtype)
    for index, row in enumerate(rows):
        size = min(len(row), width)
        grid[index, :size] = row[:size]
    return torch.from_numpy(grid)


def _empty() -> PackedBatch:
    zero, none = torch.zeros(1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.bool)
    return PackedBatch(
        input_ids=zero[None],
        position_ids=zero[None],
        layout=PackedLayout.of([1]),
        head_rows=zero,
        targets=zero,
        inverse_temperature=None,
        cells=zero,
        policy_mask=none,
        loss_mask=none,
        rollout_logp=torch.zeros(1, 1),
        advantages=torch.zeros(1, 1),
        turn_ids=torch.full((1, 1), -1),
    )
