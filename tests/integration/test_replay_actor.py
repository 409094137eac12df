"""The replay buffer as a Ray actor: waiting, batches of deliveries, restarts, names, and a loop that stays free."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.replay import Entry, LeaseLost, ReplaySettings
from tests.replay_samples import sample
from tests.requirements import need
from toolrl.registry import UnknownName

need("ray")
import ray

from actors.replay import actor as replay_actor

pytestmark = pytest.mark.ray
SETTINGS = ReplaySettings(group_size=4, batch_groups=2, max_staleness=0)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
    )
    yield
    ray.shutdown()


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Starts this test's buffer, or starts it again."""
    name = request.node.name

    def build(settings: ReplaySettings = SETTINGS) -> Any:
        return replay_actor.start(name, tmp_path / "replay.db", settings)

    yield build
    replay_actor.stop(name)


def entries(group_id: str, version: int = 0) -> list[Entry]:
    return [Entry.of(sample(group_id, index, versions=(version, version))) for index in range(4)]


async def test_the_learner_waits_and_wakes_when_the_last_group_is_ready(start: Callable[..., Any]) -> None:
    buffer = start()
    tickets = [await buffer.lease_ticket.remote("w0") for _ in range(2)]
    waiting = asyncio.ensure_future(_as_future(buffer.wait_for_batch.remote("learner", 2, 0, timeout_s=30)))
    await buffer.put.remote("w0", entries(tickets[0].group_id))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    put_at = time.monotonic()
    assert await buffer.put.remote("w0", entries(tickets[1].group_id)) == ["accepted"] * 4
    batch = await waiting
    assert time.monotonic() - put_at < 0.5, "woken by the delivery, not by a poll"
    assert [[t.sample_index for t in group] for group in batch.trajectories()] == [[0, 1, 2, 3]] * 2


async def test_a_learner_whose_tasks_have_no_spread_is_told_at_once(start: Callable[..., Any]) -> None:
    buffer = start(ReplaySettings(group_size=4, batch_groups=2, max_staleness=0, max_refills=1))
    tickets = [await buffer.lease_ticket.remote("w0") for _ in range(2)]
    waiting = asyncio.ensure_future(_as_future(buffer.wait_for_batch.remote("learner", 2, 0, timeout_s=60)))
    for ticket in tickets:
        assert not waiting.done()
        same = [Entry.of(sample(ticket.group_id, index, reward=0.4)) for index in range(4)]
        await buffer.put.remote("w0", same)
    assert await asyncio.wait_for(waiting, 10) is None
    assert "2 groups in a row had rewards without spread" in await buffer.no_spread.remote()


async def test_workers_beyond_the_bound_wait_until_the_next_version_is_published(start: Callable[..., Any]) -> None:
    buffer = start()
    tickets = [await buffer.wait_for_ticket.remote("w0") for _ in range(2)]
    assert await buffer.wait_for_ticket.remote("w0", timeout_s=0.2) is None
    waiting = [asyncio.ensure_future(_as_future(buffer.wait_for_ticket.remote(f"w{i}", timeout_s=30))) for i in (1, 2)]
    for ticket in tickets:
        await buffer.put.remote("w0", entries(ticket.group_id))
    batch = await buffer.wait_for_batch.remote("learner", 2, 0, timeout_s=10)
    await buffer.ack.remote(batch.batch_id, 1, 1)
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in waiting)
    await buffer.set_version.remote(1)
    assert sorted(ticket.task_index for ticket in await asyncio.gather(*waiting)) == [2, 3]


async def test_a_worker_that_told_an_old_version_is_asked_again_at_once(start: Callable[..., Any]) -> None:
    buffer = start(ReplaySettings(group_size=4, batch_groups=1, max_staleness=0))
    ticket = await buffer.wait_for_ticket.remote("w0", engine_version=0)
    asking = buffer.wait_for_ticket.remote("w0", engine_version=0, timeout_s=60)
    waiting = asyncio.ensure_future(_as_future(asking))
    await buffer.put.remote("w0", entries(ticket.group_id))
    batch = await buffer.wait_for_batch.remote("learner", 1, 0, timeout_s=10)
    await buffer.ack.remote(batch.batch_id, 1, 1)
    await buffer.set_version.remote(1)
    assert await asyncio.wait_for(waiting, 10) is None
    again = await buffer.wait_for_ticket.remote("w0", engine_version=1, timeout_s=10)
    assert (again.task_index, again.version) == (1, 1)


async def test_a_batch_that_does_not_come_is_given_up_by_the_deadline_and_explained(start: Callable[..., Any]) -> None:
    buffer = start()
    ticket = await buffer.lease_ticket.remote("w7")
    await buffer.put.remote("w7", entries(ticket.group_id)[:3])
    began = time.monotonic()
    assert await buffer.wait_for_batch.remote("learner", 2, 0, timeout_s=0.5) is None
    assert time.monotonic() - began < 2
    assert "1 groups ready, 2 wanted" in await buffer.waiting_for.remote(), "three of four went on as a group"
    assert (await buffer.ledger.remote()).dropped == {"late": 1}


async def test_patience_ends_before_the_timeout(start: Callable[..., Any]) -> None:
    buffer = start()
    ticket = await buffer.lease_ticket.remote("w0")
    await buffer.put.remote("w0", entries(ticket.group_id)[:3])
    began = time.monotonic()
    batch = await buffer.wait_for_batch.remote("learner", 1, 0, timeout_s=20, patience_s=0.3)
    assert 0.3 <= time.monotonic() - began < 3
    assert [len(group) for group in batch.trajectories()] == [3]


async def test_killed_in_the_middle_it_restarts_by_itself_and_goes_on_from_its_file(start: Callable[..., Any]) -> None:
    buffer = start()
    tickets = [await buffer.lease_ticket.remote("w0") for _ in range(2)]
    await buffer.put.remote("w0", entries(tickets[0].group_id))
    waiting = _as_future(buffer.wait_for_batch.remote("learner", 2, 0, timeout_s=60, request="step 1"))
    waiting = asyncio.ensure_future(waiting)
    await asyncio.sleep(0.2)
    ray.kill(buffer, no_restart=False)
    await buffer.put.remote("w0", entries(tickets[1].group_id))
    batch = await waiting
    assert [group.task_index for group in batch.groups] == [0, 1]
    ray.kill(buffer, no_restart=False)
    assert await buffer.ack.remote(batch.batch_id, 1, 1) is True
    ledger = await buffer.ledger.remote()
    assert (ledger.issued, ledger.trained, ledger.balances) == (8, 8, True)
    assert await buffer.audit.remote() == []


async def test_a_new_driver_takes_over_name_and_file(start: Callable[..., Any]) -> None:
    ticket = await start().lease_ticket.remote("w0")
    began = time.monotonic()
    again = start()
    assert time.monotonic() - began < 20
    assert await again.put.remote("w0", entries(ticket.group_id)) == ["accepted"] * 4
    assert (await again.ledger.remote()).ready == 4


async def test_it_outlives_its_handles(start: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    start()
    gc.collect()
    await asyncio.sleep(1.0)
    assert (await ray.get_actor(request.node.name).ledger.remote()).balances


async def test_errors_arrive_as_what_they_are(start: Callable[..., Any], tmp_path: Path) -> None:
    buffer = start()
    with pytest.raises(LeaseLost, match="batch 5 was never leased"):
        await buffer.ack.remote(5, 1, 1)
    with pytest.raises(ValueError, match="was never issued"):
        await buffer.put.remote("w0", [sample("g000042", 0)])
    with pytest.raises(UnknownName, match="did you mean 'freshest'"):
        replay_actor.start("wrong", tmp_path / "x.db", ReplaySettings(sampling="fresh"))


async def test_the_loop_answers_at_once_under_a_flood_of_deliveries(start: Callable[..., Any]) -> None:
    buffer = start(ReplaySettings(group_size=64, batch_groups=40, max_staleness=0))
    tickets = [await buffer.lease_ticket.remote("w0") for _ in range(40)]
    flood = [[Entry.of(sample(ticket.group_id, i, versions=[0] * 340)) for i in range(64)] for ticket in tickets]
    await buffer.ping.remote()
    began = time.monotonic()
    puts = [buffer.put.remote("w0", batch) for batch in flood]
    pings = []
    for _ in range(10):
        asked = time.monotonic()
        await buffer.ping.remote()
        pings.append(time.monotonic() - asked)
    await asyncio.gather(*map(_as_future, puts))
    flooded_s = time.monotonic() - began
    assert (await buffer.ledger.remote()).ready == 40 * 64
    assert sorted(pings)[5] < flooded_s / 10, f"pings took {pings}, the flood {flooded_s}"


async def _as_future(reference: Any) -> Any:
    return await reference
