"""A micro-batch as the model reads it: sequences in one row without padding, and the grid [B, R] its losses live on.

What sequences begin with in common stands in the row once (`learner/prefixes.py`); positions count within each sequence.
Only what a loss needs is computed: tokens after a sequence's last policy token are left out, and only positions that
predict a policy token go through the head, once for each sequence. An empty share becomes one token whose loss weighs
0, so that its rank takes part in every collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from learner.layout import PackedLayout
from learner.prefixes import PrefixOrder, Sharing
from learner.row_slices import OwnRows, RowSlice
from learner.sequence import TrainSequence

_ID_BITS = 32  # of what `model_line` gives for a token; above them hidden tokens are counted
_ID_MASK = (1 << _ID_BITS) - 1


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
    engine_gap: torch.Tensor | None = None  # [B, R] float32, see `TrainSequence`; None: `rollout_logp` tells it for all
    gap_is_given: torch.Tensor | None = None  # [B, 1] bool, the sequences that have one
    head_pieces: int = 1  # into at least so many pieces the head's rows are cut: as many as on the rank with most rows
    row_slice: RowSlice | None = None  # what of the row this rank holds; None: all of it

    def held(self, row: torch.Tensor) -> torch.Tensor:
        """[1, n] of [1, N]: what this rank reads of the row."""
        return row if self.row_slice is None else self.row_slice.held(row)

    def own(self, rows: torch.Tensor) -> OwnRows:
        """Those of some positions [M] of the row that this rank computes."""
        return OwnRows.of(rows, self.row_slice)

    def engine_logp(self, old_logp: torch.Tensor) -> torch.Tensor:
        """[B, R] log μ beside `old_logp` [B, R]: as the engine reported it, or by the gap that is given instead."""
        if self.engine_gap is None or self.gap_is_given is None:
            return self.rollout_logp
        return torch.where(self.gap_is_given, old_logp.detach() - self.engine_gap, self.rollout_logp)

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


def pack(sequences: Sequence[TrainSequence], share: Sharing = "auto") -> PackedBatch:
    """The packed batch of these sequences, in their order; see the module for the empty one.

    Args:
        share: what they have in common is read once wherever possible ("on"), where it pays ("auto") or not ("off").
    """
    if not sequences:
        return _empty()
    lines = [model_line(sequence) for sequence in sequences]
    tree = PrefixOrder(lines, share).tree
    row = np.concatenate([lines[segment.holder][segment.start : segment.end] for segment in tree.segments])
    row = row.astype(np.int64, copy=False)
    layout = PackedLayout.of_tree(tree)
    if any(sequence.hidden is not None for sequence in sequences):
        layout = replace(layout, positions=layout.positions + torch.from_numpy(row >> _ID_BITS))
    width = 1 + max(model_tokens(sequence) - sequence.prompt_length for sequence in sequences)
    picked = [np.flatnonzero(sequence.policy_mask) for sequence in sequences]
    rows, cells, targets = [], [], []
    for index, (sequence, where) in enumerate(zip(sequences, picked, strict=True)):
        spots = np.concatenate([np.arange(*layout.starts[at : at + 2]) for at in tree.chain(index)])
        before = sequence.prompt_length - 1 + where
        rows.append(spots[before if sequence.hidden is None else np.cumsum(_visible(sequence))[before] - 1])
        cells.append(index * width + where)
        targets.append(sequence.token_ids[sequence.prompt_length + where])
    temperatures = np.asarray([sequence.temperature for sequence in sequences], dtype=np.float32)
    scale = None
    if (temperatures != 1).any():
        scale = torch.from_numpy(np.repeat(1 / temperatures, [len(where) for where in picked]))
    return PackedBatch(
        input_ids=torch.from_numpy(row & _ID_MASK).long()[None],
        position_ids=layout.positions[None],
        layout=layout,
        head_rows=torch.from_numpy(np.concatenate(rows)),
        targets=torch.from_numpy(np.concatenate(targets)).long(),
        inverse_temperature=scale,
        cells=torch.from_numpy(np.concatenate(cells)),
        policy_mask=_grid([sequence.policy_mask for sequence in sequences], width, bool, False),
        loss_mask=_grid([sequence.loss_mask for sequence in sequences], width, bool, False),
        rollout_logp=_grid([sequence.rollout_logp for sequence in sequences], width, np.float32, 0.0),
        advantages=_grid([sequence.advantages for sequence in sequences], width, np.float32, 0.0),
        turn_ids=_grid([sequence.turn_ids for sequence in sequences], width, np.int64, -1),
        **_given_gaps(sequences, width),
    )


def _given_gaps(sequences: Sequence[TrainSequence], width: int) -> dict[str, torch.Tensor]:
    gaps = [sequence.engine_gap for sequence in sequences]
    if all(gap is None for gap in gaps):
        return {}
    given = torch.tensor([gap is not None for gap in gaps])[:, None]
    none: np.ndarray = np.zeros(0, dtype=np.float32)
    return {
        "engine_gap": _grid([none if gap is None else gap for gap in gaps], width, np.float32, 0.0),
        "gap_is_given": given,
    }


def model_line(sequence: TrainSequence) -> np.ndarray:
    """What the model reads for this sequence alone, by which its tokens are told from those of others: the ids of all before
    its last policy token.

    Hidden tokens are left out, and of each token behind them the number of those is added, times 2^32: it stands at another
    position than one that is as far into a sequence where nothing is hidden.
    """
    ids = sequence.token_ids[: model_tokens(sequence)]
    if sequence.hidden is None:
        return ids
    visible = _visible(sequence)[: len(ids)]
    line: np.ndarray = (ids + (np.cumsum(~visible) << _ID_BITS))[visible]
    return line


def _visible(sequence: TrainSequence) -> np.ndarray:
    """[T] bool: what later tokens see."""
    assert sequence.hidden is not None
    return np.concatenate([np.ones(sequence.prompt_length, dtype=bool), ~sequence.hidden])


def model_tokens(sequence: TrainSequence) -> int:
    """Tokens that the model reads for this sequence alone, hidden ones counted."""
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
