"""Messages to the replay buffer: few, complete, and each episode answered for itself. The store is the real one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.deliveries import SAVE_EVERY_S, Deliveries
from actors.replay import Entry, ReplaySettings, ReplayStore
from tests.replay_samples import sample
from toolrl.trajectory import Outcome


class Remote:
    """The store behind calls that take a moment; `calls` holds how many episodes each carried."""

    def __init__(self, store: ReplayStore) -> None:
        self.store = store
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        class Call:
            @staticmethod
            def remote(worker: str, entries: list[Entry]) -> asyncio.Task[Any]:
                return asyncio.get_running_loop().create_task(later(name, worker, entries))

        async def later(name: str, worker: str, entries: list[Entry]) -> Any:
            self.calls.append((name, len(entries)))
            await asyncio.sleep(0.02)
            return getattr(self.store, name)(worker, entries)

        return Call


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    settings = ReplaySettings(group_size=8, batch_groups=1, max_staleness=1, drop_uniform_groups=False)
    return Remote(ReplayStore(tmp_path / "ledger.sqlite", settings))


def group(remote: Remote) -> str:
    ticket = remote.store.lease_ticket("w")
    assert ticket is not None
    return ticket.group_id


async def test_episodes_that_end_together_travel_together_and_all_arrive(remote: Remote) -> None:
    group_id = group(remote)
    deliveries = Deliveries("w", remote, still_running=lambda trajectory: True)
    await asyncio.gather(*(deliveries.deliver(Entry.of(sample(group_id, index))) for index in range(8)))
    assert len(remote.calls) <= 2 and sum(size for _, size in remote.calls) == 8
    assert remote.store.ledger().balances and remote.store.lease_batch("learner", 1, 0) is not None


async def test_an_episode_that_the_buffer_refuses_fails_alone(remote: Remote) -> None:
    group_id = group(remote)
    deliveries = Deliveries("w", remote, still_running=lambda trajectory: True)
    entries = [Entry.of(sample(name, index)) for index, name in enumerate([group_id, "g999999", group_id])]
    told = await asyncio.gather(*(deliveries.deliver(entry) for entry in entries), return_exceptions=True)
    assert told[0] is None and isinstance(told[1], ValueError) and told[2] is None
    assert remote.store.ledger().balances


async def test_what_waits_for_nobody_any_more_is_sent_all_the_same(remote: Remote) -> None:
    group_id = group(remote)
    deliveries = Deliveries("w", remote, still_running=lambda trajectory: True)
    waiting = [asyncio.create_task(deliveries.deliver(Entry.of(sample(group_id, index)))) for index in range(8)]
    await asyncio.sleep(0)
    waiting[3].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.sleep(0.1)
    assert remote.store.lease_batch("learner", 1, 0) is not None


async def test_the_last_boundary_of_what_still_runs_is_saved_once(remote: Remote) -> None:
    group_id = group(remote)
    trajectories = [sample(group_id, index) for index in range(3)]
    gone = trajectories[2].id
    deliveries = Deliveries("w", remote, still_running=lambda trajectory: trajectory.id != gone)
    for trajectory in trajectories:
        trajectory.outcome = None
        deliveries.save(trajectory)
        deliveries.save(trajectory)
    trajectories[1].outcome = Outcome.ANSWERED  # it ends before its boundary is sent
    trajectories[0].turns.append(trajectories[0].turns[0])  # another turn, whose end is no boundary yet
    turns = len(trajectories[0].turns) - 1
    await asyncio.sleep(SAVE_EVERY_S + 0.2)
    assert remote.calls == [("put_progress", 1)]
    remote.store.return_ticket("w", group_id)
    ticket = remote.store.lease_ticket("v")
    assert ticket is not None and {index: len(t.turns) for index, t in ticket.progress.items()} == {0: turns}
