"""Who computes what: every sequence once, the cap kept, loads even, all ranks in step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.planning import plan_micro_batches, split_updates
from learner.prefixes import PrefixOrder
from learner.schedule import learning_rate


def unrelated(lengths: list[int]) -> PrefixOrder:
    return PrefixOrder([np.full(length, index) for index, length in enumerate(lengths)], "on")


LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 5), cap=st.integers(1, 1500))
def test_a_plan_holds_each_sequence_once_within_the_cap(lengths, ranks, cap):
    plan = plan_micro_batches(unrelated(lengths), ranks=ranks, max_tokens=cap)
    assert all(len(micro_batch) == ranks for micro_batch in plan)
    shares = [share for micro_batch in plan for share in micro_batch]
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    for share in shares:
        assert len(share) <= 1 or sum(lengths[index] for index in share) <= cap
        assert [lengths[index] for index in share] == sorted((lengths[index] for index in share), reverse=True)
    assert plan == plan_micro_batches(unrelated(lengths), ranks=ranks, max_tokens=cap)


def test_ranks_carry_even_loads():
    lengths = [37 * index % 211 + 20 for index in range(128)]
    plan = plan_micro_batches(unrelated(lengths), ranks=4, max_tokens=1024)
    loads = [sum(lengths[index] for micro_batch in plan for index in micro_batch[rank]) for rank in range(4)]
    assert max(loads) < 1.01 * min(loads)
    assert len(plan) <= -(-sum(lengths) // (4 * 1024)) + 1


def test_fewer_sequences_than_ranks_leave_empty_shares():
    assert plan_micro_batches(unrelated([5]), ranks=3, max_tokens=10) == [[[0], [], []]]


def test_a_cap_below_one_is_refused():
    with pytest.raises(ValueError, match="tokens_per_micro_batch"):
        plan_micro_batches(unrelated([5]), ranks=1, max_tokens=0)


@settings(max_examples=100, deadline=None)
@given(groups=st.integers(1, 20), size=st.integers(1, 5), updates=st.integers(1, 8), seed=st.integers(0, 9))
def test_updates_cover_the_batch_once_and_keep_groups_whole_where_they_can(groups, size, updates, seed):
    names = [f"g{index % groups}" for index in range(groups * size)]
    parts = split_updates(names, updates, seed)
    assert sorted(index for part in parts for index in part) == list(range(len(names)))
    assert len(parts) == min(updates, len(names)) and all(parts)
    if groups >= updates:
        owners = {name: {k for k, part in enumerate(parts) if any(names[i] == name for i in part)} for name in names}
        assert all(len(where) == 1 for where in owners.values())
    assert parts == split_updates(names, updates, seed)


def test_updates_are_shuffled_by_the_seed():
    names = [str(index) for index in range(32)]
    assert split_updates(names, 4, 0) != split_updates(names, 4, 1)


def test_schedules():
    def rates(schedule: str, steps: range) -> list[float]:
        return [learning_rate(s, base=1.0, schedule=schedule, warmup_steps=4, total_steps=12) for s in steps]

    assert rates("constant", range(5)) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates("linear", range(4, 13, 4)) == [1.0, 0.5, 0.0]
    assert rates("cosine", range(4, 17, 4)) == pytest.approx([1.0, 0.5, 0.0, 0.0])
    with pytest.raises(ValueError, match="unknown schedule"):
        rates("step", range(5, 6))
