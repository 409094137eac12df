"""Who computes what: the batch split into updates, each update into micro-batches of at most so many tokens, balanced
over ranks.

Every rank makes the same plan from the same batch, so no rank has to be told, and every rank runs the same number of
micro-batches (the collectives of ZeRO would wait for ever otherwise); where sequences are short a rank's share may be
empty. A sequence is never split; one that is longer than the cap is alone in its micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

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


def plan_micro_batches(lengths: Sequence[int], *, ranks: int, max_tokens: int) -> MicroBatches:
    """Balanced shares of the sequences with these lengths in tokens.

    Greedy (longest sequence into the emptiest share) over ranks · n shares, with the smallest n that keeps the cap.
    """
    if max_tokens < 1:
        raise ValueError(f"tokens_per_micro_batch is {max_tokens}; it must be at least 1")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    count = max(1, -(-sum(lengths) // (ranks * max_tokens)))
    while True:
        shares = _fill(lengths, order, ranks * count)
        loads = [sum(lengths[index] for index in share) for share in shares]
        fits = all(load <= max_tokens or len(share) == 1 for load, share in zip(loads, shares, strict=True))
        if fits or count >= max(len(lengths), 1):
            break
        count += 1
    by_load = sorted(range(len(shares)), key=lambda share: (-loads[share], share))
    micro_batches = []
    for start in range(0, len(by_load), ranks):
        row = by_load[start : start + ranks]
        if (start // ranks) % 2:
            row.reverse()  # snake order: the rank with the heaviest share now gets the lightest next
        micro_batches.append([shares[share] for share in row])
    return micro_batches


def _fill(lengths: Sequence[int], order: Sequence[int], count: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, share) for share in range(count)]
    for index in order:
        load, share = heapq.heappop(heap)
        shares[share].append(index)
        heapq.heappush(heap, (load + lengths[index], share))
    return shares
