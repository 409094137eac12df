"""Who computes what: the batch split into updates, each update into micro-batches of at most so many tokens, balanced
over ranks.

Every rank makes the same plan from the same batch, so no rank has to be told, and every rank runs the same number of
micro-batches (the collectives of ZeRO would wait for ever otherwise); where sequences are short a rank's share may be
empty. A sequence is never split; one that is longer than the cap is alone in its micro-batch. What the sequences of a
share begin with in common counts once, as it is computed once; a family too large for the cap is cut, and each part
repeats the prefix.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from learner.prefixes import PrefixOrder

MicroBatches = list[list[list[int]]]  # [micro-batch][rank] -> indices of sequences, longest first


def split_updates(groups: Sequence[str], updates: int, seed: int) -> list[list[int]]:
    """Indices of the sequences of each optimiser step: whole groups where there are enough of them, single sequences
    otherwise.

    Each sequence is in exactly one update; the order is shuffled by `seed`. Fewer sequences than updates give fewer
    updates.
    """
    generator = np.random.default_rng(seed)
    names = list(dict.fromkeys(groups))
    if len(names) >= updates:
        members: dict[str, list[int]] = {name: [] for name in names}
        for index, name in enumerate(groups):
            members[name].append(index)
        units = [members[name] for name in names]
    else:
        units = [[index] for index in range(len(groups))]
    order = generator.permutation(len(units))
    parts = np.array_split(order, min(updates, max(len(units), 1)))
    return [[index for unit in part for index in units[unit]] for part in parts]


@dataclass(frozen=True, slots=True)
class _Share:
    """Places in the order of the prefixes, increasing, and the tokens that the model reads for them."""

    places: list[int]
    tokens: int


def plan_micro_batches(prefixes: PrefixOrder, *, ranks: int, max_tokens: int) -> MicroBatches:
    """Balanced shares of these sequences in ranks · n parts, with the smallest n that keeps the cap.

    Two plans are made. One keeps families (sequences that share a beginning) whole where the cap allows and puts the
    largest into the emptiest share; the other cuts the sequences in the order of their tokens into even runs, which
    repeats the prefixes at the cuts. The one whose heaviest ranks carry less in sum is taken: micro-batch after
    micro-batch, all ranks wait for the heaviest.
    """
    if max_tokens < 1:
        raise ValueError(f"tokens_per_micro_batch is {max_tokens}; it must be at least 1")
    costs, limit = _Costs(prefixes), max_tokens
    while True:
        plans = [_in_rows(_whole_families(costs, ranks, limit), ranks)]
        if costs.related:
            plans.append(_in_rows(_even_runs(costs, ranks, limit), ranks))
        best = min(plans, key=lambda rows: sum(max(share.tokens for share in row) for row in rows))
        over = max(0, *(_excess(share, prefixes, max_tokens) for row in best for share in row)) if costs.related else 0
        if not over:
            break
        limit = max(0, limit - over)  # a part of a cut family may share less than the family does; 0: all are alone
    line = prefixes.order.tolist()
    longest_first = prefixes.lengths.__getitem__
    return [
        [
            sorted((line[place] for place in share.places), key=lambda index: (-longest_first(index), index))
            for share in row
        ]
        for row in best
    ]


class _Costs:
    """Tokens of runs of neighbours, from sums: a line after its neighbour costs what was not read before."""

    def __init__(self, prefixes: PrefixOrder) -> None:
        self.whole = prefixes.lengths[prefixes.order].tolist()
        before = prefixes.read_before
        self.sums = [0, *np.cumsum(prefixes.lengths[prefixes.order] - before).tolist()]
        starts = [place for place, known in enumerate(before.tolist()) if known == 0]
        self.families = list(zip(starts, [*starts[1:], len(before)], strict=True)) if starts else []
        self.related = len(self.families) < len(before)

    def run(self, begin: int, end: int) -> _Share:
        return _Share(list(range(begin, end)), self.whole[begin] + self.sums[end] - self.sums[begin + 1])

    def cut(self, begin: int, end: int, limit: int) -> list[_Share]:
        """Places from `begin` to `end` in runs of at most `limit` tokens, or of one sequence."""
        runs = []
        while begin < end:
            room = limit - self.whole[begin] + self.sums[begin + 1]
            stop = max(begin + 1, bisect_right(self.sums, room, begin + 1, end + 1) - 1)
            runs.append(self.run(begin, stop))
            begin = stop
        return runs


def _excess(share: _Share, prefixes: PrefixOrder, max_tokens: int) -> int:
    if len(share.places) < 2:
        return 0
    return max(0, prefixes.tokens(share.places) - max_tokens)


def _whole_families(costs: _Costs, ranks: int, limit: int) -> list[_Share]:
    """Families over the limit are cut into runs; then the largest goes into the emptiest share."""
    units = [unit for begin, end in costs.families for unit in costs.cut(begin, end, limit)]
    units.sort(key=lambda unit: -unit.tokens)
    count = max(1, -(-sum(unit.tokens for unit in units) // (ranks * max(1, limit))))
    while True:
        filled: list[list[_Share]] = [[] for _ in range(ranks * count)]
        heap = [(0, index) for index in range(ranks * count)]
        for unit in units:
            load, index = heapq.heappop(heap)
            filled[index].append(unit)
            heapq.heappush(heap, (load + unit.tokens, index))
        shares = [_Share(sorted(p for u in part for p in u.places), sum(u.tokens for u in part)) for part in filled]
        if count >= len(units) or all(share.tokens <= limit or len(share.places) == 1 for share in shares):
            return shares
        count += 1


def _even_runs(costs: _Costs, ranks: int, limit: int) -> list[_Share]:
    """Runs of neighbours, as few as the limit allows (a multiple of `ranks`), the heaviest as light as can be."""
    runs = costs.cut(0, len(costs.whole), limit)
    count = ranks * -(-len(runs) // ranks)
    low, high = 0, limit  # of the heaviest run: too little, enough
    while high - low > 1:
        middle = (low + high) // 2
        found = costs.cut(0, len(costs.whole), middle)
        if len(found) > count:
            low = middle
        else:
            runs, high = found, middle
    return runs + [_Share([], 0)] * (count - len(runs))


def _in_rows(shares: list[_Share], ranks: int) -> list[list[_Share]]:
    """One row a micro-batch, the heaviest first, dealt out so that each rank's sum is even too."""
    by_load = sorted(shares, key=lambda share: -share.tokens)
    rows = [by_load[start : start + ranks] for start in range(0, len(by_load), ranks)]
    for row in rows[1::2]:
        row.reverse()  # snake order: the rank with the heaviest share now gets the lightest next
    return rows
