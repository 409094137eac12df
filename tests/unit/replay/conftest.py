"""A store of its own for every test, audited when the test is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.replay import ReplaySettings, ReplayStore
from tests.replay_samples import Clock, MakeStore


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[MakeStore]:
    """Opens the store of this test; called again, it closes it and opens it anew."""
    opened: list[ReplayStore] = []

    def build(**settings: Any) -> ReplayStore:
        while opened:
            opened.pop().close()
        chosen = {"group_size": 4, "batch_groups": 2, "max_staleness": 0} | settings
        opened.append(ReplayStore(tmp_path / "replay.db", ReplaySettings(**chosen), clock))
        return opened[-1]

    yield build
    for store in opened:
        assert store.audit() == []
        assert store.ledger().balances
        store.close()
