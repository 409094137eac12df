"""A packed row whose tokens lie on several ranks: which are this rank's, and how all ranks get what each computed of its own.

A rank's slice is contiguous and as long as every other one's; the row is filled up at its end with tokens of which nothing
is read. What a loss needs (a log-probability, an entropy, a value: one number a token or turn) is joined over the
ranks of the row, each of which then computes the loss of the whole row, as if the row were its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Tokens [begin, end) of a packed row of N, on one of the ranks of `sequence`."""

    sequence: Any  # the SequenceGroup of learner/ulysses.py
    begin: int
    end: int  # beyond N where the row is filled up

    @classmethod
    def of(cls, sequence: Any, tokens: int) -> RowSlice:
        """This rank's slice of a row of N tokens; no slice is empty."""
        length = -(-tokens // sequence.size)
        return cls(sequence, sequence.rank * length, (sequence.rank + 1) * length)

    def held(self, row: torch.Tensor) -> torch.Tensor:
        """[1, end − begin] of [1, N], 0 where the row is filled up."""
        mine = row[:, self.begin : self.end]
        return pad(mine, (0, self.end - self.begin - mine.shape[1]))


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Of M positions of a packed row those m that this rank computes; all of them where the row is its own."""

    rows: torch.Tensor  # [m] where they stand in what this rank holds of the row
    places: torch.Tensor | None = None  # [m] where they stand among the M; None: m = M
    count: int = 0  # M
    group: Any = None  # the process group of the row's ranks

    @classmethod
    def of(cls, rows: torch.Tensor, held: RowSlice | None) -> OwnRows:
        """Of positions [M] in the whole row, in any order, repeated ones too."""
        if held is None:
            return cls(rows)
        places = ((rows >= held.begin) & (rows < held.end)).nonzero().squeeze(1)
        return cls(rows[places] - held.begin, places, len(rows), held.sequence.group)

    def of_all(self, values: torch.Tensor) -> torch.Tensor:
        """[m] of [M]."""
        return values if self.places is None else values[self.places]

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """[M, …] on every rank of the row from the [m, …] of each; collective. See `_Join` for the gradient."""
        if self.places is None:
            return values
        joined: torch.Tensor = _Join.apply(values, self.places, self.count, self.group)
        return joined


class _Join(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Every rank's numbers at their places. Each place is one rank's, so adding zeros is exact, and one call does for shares
    of any size.

    All ranks compute the same loss of what is joined, so each has the whole gradient of its own numbers already:
    the backward pass picks them and adds nothing up.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, places: torch.Tensor, count: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(places)
        whole = values.new_zeros(count, *values.shape[1:]).index_copy_(0, places, values)
        torch.distributed.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None, None
