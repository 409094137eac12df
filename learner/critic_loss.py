"""The mathematics of a critic: where values are read, what they are trained towards, how well they explain the returns.

    L = ½ · mean over turns of max((V − R)², (V_old + clamp(V − V_old, −c, c) − R)²)          (Schulman et al. 2017)

V is read at the last token before a turn's first action token: the last prompt token for the first turn, the last tool
token for a later one, and after an empty tool turn the last token of the turn before. That is the row from which the
first action token is predicted. Trap: turns are told apart by their recorded ids, never by gaps in the mask (an empty tool
turn leaves none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from learner.packing import PackedBatch
from learner.sequence import ValueTargets


@dataclass(slots=True)
class ValueRows:
    """Where the K turns of a packed batch begin, ordered by sequence and turn."""

    rows: torch.Tensor  # [K] in the packed row
    sequence: torch.Tensor  # [K] of the batch's B

    @classmethod
    def of(cls, batch: PackedBatch) -> ValueRows:
        """From the recorded turn ids of the batch's policy tokens."""
        order = batch.cells.argsort()
        cells, rows = batch.cells[order], batch.head_rows[order]
        acted = batch.policy_mask.flatten()[cells]  # all but the one token of an empty share
        cells, rows = cells[acted], rows[acted]
        sequence, turn = cells // batch.policy_mask.shape[1], batch.turn_ids.flatten()[cells]
        begins = torch.ones_like(cells, dtype=torch.bool)
        begins[1:] = (sequence[1:] != sequence[:-1]) | (turn[1:] != turn[:-1])
        return cls(rows[begins], sequence[begins])

    def split(self, values: torch.Tensor, sequences: int) -> list[np.ndarray]:
        """[K] values as one array a sequence of the batch."""
        sizes = torch.bincount(self.sequence, minlength=sequences).tolist()
        return [part.float().cpu().numpy() for part in values.detach().split(sizes)]


def value_losses(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss of each turn [K] with its gradient, which of them are clipped [K] bool); all [K].

    A clipped turn has no gradient: V has moved further than `clip` from its old value and the loss there is the larger
    one. `clip` None: the plain half square. A NaN surfaces in the loss.
    """
    plain = (values - returns).square() / 2
    if clip is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip, clip)
    bounded = (near - returns).square() / 2
    # Near its old value V comes back from `near` but for rounding, which must not count. False for NaN, which so surfaces.
    clipped = (bounded > plain) & ((values - old_values).abs() > clip)
    return torch.where(clipped, bounded, plain), clipped


def explained_variance(targets: Sequence[ValueTargets]) -> float:
    """1 − Var(R − V) / Var(R) over all turns: 1 for a perfect critic, 0 for a constant one; 0 where no return differs."""
    if not targets:
        return 0.0
    returns = np.concatenate([each.returns for each in targets]).astype(np.float64)
    values = np.concatenate([each.old_values for each in targets]).astype(np.float64)
    spread = returns.var()
    return float(1 - (returns - values).var() / spread) if spread > 0 else 0.0
