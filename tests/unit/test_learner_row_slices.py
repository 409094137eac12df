"""A row on several ranks: every token and every wanted row is one rank's, and what the ranks compute meets at its place."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from learner.packing import pack
from learner.row_slices import OwnRows, RowSlice
from learner.ulysses import RankGroups
from tests.unit.learner_fixtures import random_sequences


def slices(size: int, tokens: int) -> list[RowSlice]:
    return [RowSlice.of(SimpleNamespace(size=size, rank=rank, group=None), tokens) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8])
def test_slices_are_equally_long_and_give_the_row_back(size: int, tokens: int) -> None:
    row = torch.arange(1, tokens + 1)[None]
    parts = [part.held(row) for part in slices(size, tokens)]
    assert {part.shape for part in parts} == {(1, -(-tokens // size))}
    whole = torch.cat(parts, dim=1)[0]
    assert torch.equal(whole[:tokens], row[0]) and (whole[tokens:] == 0).all()


def test_every_row_of_the_head_is_one_rank_s_and_finds_its_token_there() -> None:
    sequences = random_sequences(5, seed=2)
    shared = np.arange(40)
    for sequence in sequences:
        sequence.token_ids = np.concatenate([shared, sequence.token_ids])
        sequence.prompt_length += len(shared)
    batch = pack(sequences, "on")
    found = torch.full_like(batch.targets, -1)
    for part in slices(3, batch.input_ids.shape[1]):
        own = OwnRows.of(batch.head_rows, part)
        assert (found[own.places] == -1).all()
        found[own.places] = part.held(batch.input_ids)[0, own.rows]
        assert torch.equal(own.of_all(batch.targets), batch.targets[own.places])
    assert torch.equal(found, batch.input_ids[0, batch.head_rows])


def test_a_rank_with_a_row_of_its_own_computes_all_of_it() -> None:
    groups = RankGroups.of(1, rank=1, world=2, timeout_s=1.0)
    assert (groups.data_rank, groups.data_ranks, groups.slice_of(7)) == (1, 2, None)
    rows, values = torch.tensor([3, 0, 3]), torch.tensor([1.0, 2.0, 3.0])
    own = OwnRows.of(rows, None)
    assert own.rows is rows and own.of_all(values) is values and own.join(values) is values
