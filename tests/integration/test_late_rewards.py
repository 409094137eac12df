"""Late rewards on the buffer's real actor: reward workers that are Ray actors, workers that post over HTTP, a buffer that
dies while everybody waits."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.replay import Entry, ReplaySettings
from tests.replay_samples import sample
from tests.requirements import need
from toolrl.reward_records import await_rewards

need("ray")
import ray

from actors.replay import actor as replay_actor
from toolrl.app.parts import BufferRewards
from toolrl.app.reward_callback import FILE, reward_callback

pytestmark = pytest.mark.ray
SETTINGS = ReplaySettings(group_size=4, batch_groups=2, max_staleness=0, reward_deadline_s=60.0, worker_lease_s=5.0)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        namespace="toolrl",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
    )
    yield
    ray.shutdown()


@pytest.fixture
def buffer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = f"{request.node.name}/replay"
    yield replay_actor.start(name, tmp_path / "replay.db", SETTINGS)
    replay_actor.stop(name)


@ray.remote(num_cpus=0)
class Judge:
    """A reward worker: finds the buffer by name, judges what waits for it."""

    async def run(self, buffer_name: str, wanted: int) -> list[str]:
        buffer = ray.get_actor(buffer_name, namespace="toolrl")
        said: list[str] = []
        while len(said) < wanted:
            for each in await buffer.wait_for_unrewarded.remote("judge", limit=3, timeout_s=5):
                value = float(each.trajectory.sample_index)
                said.append((await buffer.deliver_reward.remote(each.trajectory_id, each.name, value)).status)
        return said


def unrewarded(group_id: str) -> list[Entry]:
    finished = [sample(group_id, index, reward=0.0) for index in range(4)]
    for each in finished:
        each.prompt_ids = [each.sample_index]
        await_rewards(each, {"judge": 0.5})
    return [Entry.of(each) for each in finished]


async def put_groups(buffer: Any) -> None:
    for _ in range(2):
        ticket = await buffer.lease_ticket.remote("w0")
        assert await buffer.put.remote("w0", unrewarded(ticket.group_id)) == ["accepted"] * 4


async def test_a_reward_worker_wakes_the_learner_also_when_the_buffer_dies_in_between(
    buffer: Any, request: pytest.FixtureRequest
) -> None:
    judge = Judge.remote()
    judged = judge.run.remote(f"{request.node.name}/replay", 8)
    batch = buffer.wait_for_batch.remote("learner", 2, 0, timeout_s=60, request="step 1")
    await put_groups(buffer)
    ray.kill(buffer, no_restart=False)
    groups = (await batch).trajectories()
    assert [[m.rewards["judge"] for m in group] for group in groups] == [[0.0, 0.5, 1.0, 1.5]] * 2
    # A delivery whose answer the kill swallowed is repeated, and found to be there.
    assert set(await judged) <= {"accepted", "duplicate"}
    ledger = await buffer.ledger.remote()
    assert (ledger.leased, ledger.balances, ledger.late_rewards["accepted"]) == (8, True, 8)
    assert await buffer.audit.remote() == []


async def test_rewards_posted_over_http_reach_the_batch_and_what_never_comes_is_left_out(
    buffer: Any, tmp_path: Path
) -> None:
    def ask(body: dict[str, Any] | None = None, query: str = "") -> Any:
        found = json.loads((tmp_path / FILE).read_text())
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(found["url"] + query, data, {"Authorization": f"Bearer {found['token']}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.loads(answer.read())

    with reward_callback(BufferRewards(buffer), tmp_path, "127.0.0.1", 0):
        waiting = asyncio.create_task(asyncio.to_thread(ask, query="?name=judge&limit=64&wait_s=30"))
        await put_groups(buffer)
        awaited = (await waiting)["awaited"]
        while len(awaited) < 8:  # the first put woke it
            awaited += (await asyncio.to_thread(ask, query="?name=judge&limit=64&wait_s=30"))["awaited"]
        for each in awaited:
            if (each["group_id"], each["sample_index"]) != ("g000001", 2):
                reward = {key: each[key] for key in ("trajectory_id", "name")} | {"value": each["sample_index"]}
                assert (await asyncio.to_thread(ask, reward))["status"] == "accepted"
    batch = await buffer.wait_for_batch.remote("learner", 2, 0, timeout_s=20, patience_s=0.2)
    assert [[m.sample_index for m in group] for group in batch.trajectories()] == [[0, 1, 2, 3], [0, 1, 3]]
    assert (await buffer.ledger.remote()).dropped == {"reward_missing": 1}
