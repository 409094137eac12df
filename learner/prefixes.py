"""Which tokens several sequences have in common: found by comparing token ids, never assumed from a group's name.

The sequences of a batch form a tree of segments. A segment that several sequences begin with (a group's prompt, the
longer history that branches share, a system prompt that all tasks share) is read by the model once; each continuation
follows it with its own positions. Nothing else changes: a policy token in a shared segment belongs to every sequence
that holds it, each with its own target, advantage and loss, because the head's rows are picked for each sequence from
the row where the shared token stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

Sharing = Literal["auto", "on", "off"]

SHORTEST = 16  # tokens; a shorter common beginning is computed again in each sequence
WORTH = 0.05  # "auto": the least share of tokens that sharing a segment saves among the sequences that hold it


def sharing_on(device: torch.device, share: Sharing) -> Sharing:
    """What "auto" means there: where sharing is not measured to be faster (a GPU's masked kernels), off."""
    return "off" if share == "auto" and device.type != "cpu" else share


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start` to `end` of a sequence, the same in all sequences below it."""

    start: int
    end: int
    parent: int  # index of the segment before it; -1: none
    holder: int  # one of the sequences that hold it

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Segments, each after its parent and directly followed by all that continue it; none is empty."""

    segments: list[Segment]
    last: dict[int, int]  # of each sequence the last segment (-1: it is empty); the others are that one's ancestors

    @property
    def tokens(self) -> int:
        """What the model reads."""
        return sum(segment.size for segment in self.segments)

    def chain(self, sequence: int) -> list[int]:
        """The segments of a sequence, first to last."""
        found = []
        at = self.last[sequence]
        while at >= 0:
            found.append(at)
            at = self.segments[at].parent
        return found[::-1]


class PrefixOrder:
    """Lines of token ids in lexicographic order, where those that begin alike are neighbours, and the tree they form."""

    def __init__(self, lines: Sequence[np.ndarray], share: Sharing) -> None:
        order = list(range(len(lines)))
        common = [0] * len(lines)
        if share != "off":
            # What is added to an id never falls along a line: the last one tells whether four bytes do.
            width = ">u8" if any(len(line) and line[-1] >> 32 for line in lines) else ">u4"
            keys = [line.astype(width).tobytes() for line in lines]
            order.sort(key=keys.__getitem__)
            common[1:] = [_common(lines[a], lines[b]) for a, b in pairwise(order)]
        self.order = np.asarray(order, dtype=np.int64)
        self.lengths = np.asarray([len(line) for line in lines], dtype=np.int64)
        self.share = share
        self.common = np.asarray(common, dtype=np.int64)  # tokens in common with the neighbour before
        self.tree, self.read_before = _grow(self.order, self.lengths, self.common, share)
        # read_before: of the common tokens those that are read once if both neighbours are in one micro-batch

    def tokens(self, places: Sequence[int]) -> int:
        """What the model reads for the lines at these places of the order, increasing, in one micro-batch."""
        chosen = np.asarray(places, dtype=np.int64)
        lines = self.order[chosen]
        if self.share == "off" or len(lines) < 2:
            return int(self.lengths[lines].sum())
        lows = [self.common[a + 1 : b + 1].min() for a, b in pairwise(places)]
        return _grow(lines, self.lengths, np.asarray([0, *lows], dtype=np.int64), self.share)[0].tokens


def _common(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size


def _grow(lines: np.ndarray, lengths: np.ndarray, common: np.ndarray, share: Sharing) -> tuple[PrefixTree, np.ndarray]:
    """Ranges of neighbours are split where they have least in common; what a whole range shares becomes a segment.

    Returns:
        the tree, and for each place how many tokens were placed already for the line before.
    """
    segments: list[Segment] = []
    last: dict[int, int] = {}
    placed = np.zeros(len(lines), dtype=np.int64)
    sizes = lengths[lines]
    sums = np.concatenate([[0], np.cumsum(sizes)])
    ranges = [(0, len(lines), 0, -1)]  # from, to, tokens already placed, the segment that holds them
    while ranges:
        low, high, depth, parent = ranges.pop()
        if high - low <= 1:
            for place in range(low, high):
                line, size = int(lines[place]), int(sizes[place])
                if size > depth:
                    segments.append(Segment(depth, size, parent, line))
                    parent = len(segments) - 1
                last[line] = parent
            continue
        inner = common[low + 1 : high]
        least = int(inner.min())
        count = high - low
        separate = int(sums[high] - sums[low]) - depth * count
        if _worth(least - depth, count, separate, share):
            segments.append(Segment(depth, least, parent, int(lines[low])))
            depth, parent = least, len(segments) - 1
        inside = np.flatnonzero(inner == least) + low + 1
        placed[inside] = depth
        cuts = [low, *inside.tolist(), high]
        ranges += [(a, b, depth, parent) for a, b in zip(cuts[-2::-1], cuts[:0:-1], strict=True)]
    return PrefixTree(segments, last), placed


def _worth(size: int, count: int, separate: int, share: Sharing) -> bool:
    """Whether `size` common tokens of `count` sequences that have `separate` tokens left in sum are read once."""
    if share == "off" or size < SHORTEST:
        return False
    return share == "on" or size * (count - 1) >= WORTH * separate
