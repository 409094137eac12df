"""How the segments of a packed row lie, and how attention takes the row apart; see `learner/attention.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from learner.prefixes import PrefixOrder, PrefixTree

FULL_ENOUGH = 0.7  # shortest over longest segment of a bucket
PADDING = 1024  # below so many padded cells a further kernel call costs more than they do


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments of similar length side by side, padded at the end: `rows` × `width` cells."""

    rows: int
    width: int
    begin: int  # where the first segment stands in the row
    tokens: torch.Tensor | None  # [rows · width] the token of each cell; None: those from `begin` on, without padding
    padding: torch.Tensor | None  # the cells without a token of their own
    segments: tuple[int, ...]

    def lay(self, row: torch.Tensor) -> torch.Tensor:
        """[rows, width, …] from the row's [N, …]. Padding holds some token: nothing may come of it."""
        cells = self.rows * self.width
        flat = row[self.begin : self.begin + cells] if self.tokens is None else row.index_select(0, self.tokens)
        return flat.unflatten(0, (self.rows, self.width))


@dataclass(frozen=True, slots=True)
class Span:
    """A shared segment [begin, end) of the row, and all tokens [end, reach) that continue it."""

    begin: int
    end: int
    reach: int


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Every token of the row is in one bucket; those below a shared segment are in its span too."""

    buckets: tuple[Bucket, ...]
    spans: tuple[Span, ...]
    positions: torch.Tensor  # [N] of each token in its sequence
    home: torch.Tensor | None  # [N] the cell of each token, over all buckets; None: they lie as in the row
    starts: tuple[int, ...]  # where each segment stands in the row, and its end
    parents: tuple[int, ...]  # of each segment; -1: none

    @classmethod
    def of(cls, lengths: Sequence[int]) -> PackedLayout:
        """The layout of a row of sequences with these lengths that share nothing."""
        return cls.of_tree(PrefixOrder([np.zeros(length) for length in lengths], "off").tree)

    @classmethod
    def of_tree(cls, tree: PrefixTree) -> PackedLayout:
        """The layout of a row that holds the tree's segments in their order."""
        sizes = np.asarray([segment.size for segment in tree.segments])
        starts = np.concatenate([[0], np.cumsum(sizes)])
        parents = [segment.parent for segment in tree.segments]
        ends = starts[1:].copy()
        for index in range(len(parents) - 1, -1, -1):
            if parents[index] >= 0:
                ends[parents[index]] = max(ends[parents[index]], ends[index])
        spans = [Span(*map(int, ends3)) for ends3 in zip(starts, starts[1:], ends, strict=False) if ends3[1] < ends3[2]]
        buckets = [_bucket(part, sizes, starts) for part in _alike(sizes)]
        home = _home(buckets, sizes, starts)
        positions = np.concatenate([np.arange(segment.start, segment.end) for segment in tree.segments])
        return cls(
            tuple(buckets),
            tuple(spans),
            torch.from_numpy(positions),
            home,
            tuple(starts.tolist()),
            tuple(parents),
        )

    def gather(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[N, …] from the buckets' cells [rows · width, …]; memory of its own where several buckets or padding are."""
        cells = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return cells if self.home is None else cells.index_select(0, self.home)

    def to(self, device: torch.device) -> PackedLayout:
        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        buckets = (
            Bucket(b.rows, b.width, b.begin, moved(b.tokens), moved(b.padding), b.segments) for b in self.buckets
        )
        return PackedLayout(
            tuple(buckets), self.spans, self.positions.to(device), moved(self.home), self.starts, self.parents
        )


def _alike(sizes: np.ndarray) -> list[list[int]]:
    """Segments, longest first, cut into buckets."""
    order = np.argsort(-sizes, kind="stable").tolist()
    parts: list[list[int]] = []
    padded = 0
    for index in order:
        width = sizes[parts[-1][0]] if parts else 0
        padded += width - sizes[index]
        if not parts or (sizes[index] < FULL_ENOUGH * width and padded > PADDING):
            parts.append([])
            padded = 0
        parts[-1].append(index)
    return parts


def _bucket(part: list[int], sizes: np.ndarray, starts: np.ndarray) -> Bucket:
    width, begin = int(sizes[part[0]]), int(starts[part[0]])
    cells = starts[part][:, None] + np.arange(width)
    inside = np.arange(width) < sizes[part][:, None]
    if inside.all() and (cells.ravel() == np.arange(begin, begin + cells.size)).all():
        return Bucket(len(part), width, begin, None, None, tuple(part))
    tokens = torch.from_numpy(np.where(inside, cells, 0).ravel())
    padding = None if inside.all() else torch.from_numpy(np.flatnonzero(~inside.ravel()))
    return Bucket(len(part), width, begin, tokens, padding, tuple(part))


def _home(buckets: Sequence[Bucket], sizes: np.ndarray, starts: np.ndarray) -> torch.Tensor | None:
    home = np.empty(starts[-1], dtype=np.int64)
    base = 0
    for bucket in buckets:
        for row, segment in enumerate(bucket.segments):
            first = base + row * bucket.width
            home[starts[segment] : starts[segment + 1]] = np.arange(first, first + sizes[segment])
        base += bucket.rows * bucket.width
    # All cells are tokens and in their order: the longest first and a shorter last one leave padding behind the end.
    return None if base == len(home) and (home == np.arange(len(home))).all() else torch.from_numpy(home)
