"""Two real rollout workers on one buffer: one is killed in mid-run; its episodes go on at their last boundary, and the run
goes on, balanced, with a new worker in its place."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from typing import Any

import pytest
import pytest_asyncio

from tests.requirements import need

need("ray", "vllm")

import ray
from ray.exceptions import RayActorError
from transformers import AutoModelForCausalLM

from actors.replay import ReplaySettings
from actors.replay import actor as replay
from actors.weights import Publication, Publisher
from actors.worker_pool import WorkerPool, WorkersLost
from tests.integration.eager_policy import write_eager_model
from toolrl import presets
from toolrl.trajectory_codec import decode

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

PUBLISHER = Publisher()
SETTINGS = [
    "name=pool",
    "rollout.workers=2",
    "rollout.concurrency=8",
    "rollout.parser=tests.integration.eager_policy:SlowEager",
    "rollout.max_turn_tokens=60",
    "rollout.max_response_tokens=400",
    "rollout.lease_s=20",
    "sandbox.backend=process",
    "sandbox.min_sessions=2",
    "sandbox.max_sessions=8",
    "rewards.components=[{name: outcome}]",
    "loop.groups_per_step=2",
    "loop.group_size=4",
    "loop.steps=1000",
    "buffer.drop_uniform_groups=false",
    "buffer.max_staleness=500",
    "learner.updates_per_batch=2",
]


def published(model_dir: str, version: int) -> Publication:
    """The run's own model, as a learner would publish it."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")
    return PUBLISHER.publish(model.named_parameters(), version)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("runs")
    config = presets.load("quickstart-cpu", [*SETTINGS, f"runs_dir={place}"])
    model_dir = str(place / "eager")
    write_eager_model(place / "eager", 0)
    ray.init(
        address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, namespace="toolrl",
        object_store_memory=80 * 2**20,
    )  # fmt: skip
    buffer = await asyncio.to_thread(replay.start, "pool/replay", place / "ledger.sqlite", ReplaySettings.of(config))
    pool = await WorkerPool.start(config, model_dir, buffer)
    try:
        yield pool, buffer, model_dir
    finally:
        await pool.stop()
        replay.stop("pool/replay")
        ray.shutdown()


async def train(buffer: Any, step: int, version: int) -> list[Any]:
    """What a learner does at a step, but for learning."""
    batch = await buffer.wait_for_batch.remote("learner", 2, version, timeout_s=90, patience_s=80)
    assert batch is not None, await buffer.waiting_for.remote()
    await buffer.ack.remote(batch.batch_id, step, version)
    return [member for group in batch.trajectories() for member in group]


async def test_a_worker_killed_in_mid_run_is_replaced_and_nothing_is_lost(run: Any) -> None:
    pool, buffer, model_dir = run
    pool.begin()
    watching = asyncio.create_task(pool.watch())
    try:
        trained = await train(buffer, 1, 0)
        await pool.publish(published(model_dir, 1))
        await buffer.set_version.remote(1)
        victim = pool.members["rollout-0"]
        os.kill(victim.info["pid"], signal.SIGKILL)
        killed = time.monotonic()
        step = 1
        while pool.members.get("rollout-0") in (None, victim):
            step += 1  # the other worker keeps the learner busy meanwhile
            trained += await train(buffer, step, 1)
            assert time.monotonic() - killed < 120
        while True:
            step += 1
            trained += (batch := await train(buffer, step, 1))
            if any(t.metadata["worker"] == "rollout-0" and "continued_after" not in t.metadata for t in batch):
                break
            assert time.monotonic() - killed < 150
        newest = [t for t in batch if t.metadata["worker"] == "rollout-0" and "continued_after" not in t.metadata]
        assert {v for t in newest for turn in t.policy_turns for v in turn.weight_versions} == {1}  # the latest, first
        assert len({t.id for t in trained}) == len(trained) == 8 * step
        assert {each["version"] for each in await pool.stats()} == {1}
        taken_up = [t for t in trained if max(t.metadata.get("continued_after", [0])) > 0]
        assert taken_up and all(t.outcome.trained for t in taken_up)  # at a boundary, not from their beginning
        stats = {each["worker"]: each for each in await pool.stats()}
        assert stats["rollout-1"]["continued_episodes"] > 0 and stats["rollout-1"]["changed_replays"] == 0
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    ledger = await buffer.ledger.remote()
    assert ledger.balances and ledger.reissued["worker_lost"] > 0
    assert ledger.trained == len(trained)
    for trajectory in trained:
        trajectory.check()
        cells = [r.text for turn in trajectory.turns for r in turn.results if r.status == "ok"]
        assert [text.split()[1] for text in cells] == [str(n + 1) for n in range(len(cells))]  # variables moved with it
    assert await buffer.audit.remote() == []


async def test_actors_live_on_when_handles_are_collected(run: Any) -> None:
    pool, _, _ = run
    before = {each["worker"] for each in await pool.stats()}
    gc.collect()
    assert {each["worker"] for each in await pool.stats()} == before == {"rollout-0", "rollout-1"}


async def test_an_evaluation_plays_every_held_out_task_once(run: Any) -> None:
    pool, _, _ = run
    episodes = await pool.evaluate(5, 2, temperature=0.7)
    assert sorted((t.group_id, t.sample_index) for t in episodes) == [
        (f"eval-{i}", s) for i in range(5) for s in (0, 1)
    ]
    assert all(t.temperature == 0.7 and t.outcome.trained for t in episodes)


async def test_the_same_seeds_give_the_same_trajectories_whatever_runs_beside_them(run: Any) -> None:
    """All at once on both workers, and one after the other on each: same weights, same seeds, same tokens."""
    pool, _, _ = run
    together = {t.id: t for t in await pool.evaluate(6, 2, temperature=1.0)}
    assert len({tuple(t.response_ids) for t in together.values()}) > 6

    async def one_after_the_other(member: Any) -> None:
        for index in range(6):
            for payload in await member.actor.evaluate.remote([index], 2, 1.0):
                alone = decode(payload)
                assert alone.response_ids == together[alone.id].response_ids
                assert alone.outcome is together[alone.id].outcome

    await asyncio.gather(*map(one_after_the_other, pool.members.values()))


async def test_held_out_tasks_that_nobody_plays_in_time_are_given_up(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _, _ = run
    monkeypatch.setattr(pool.config.loop, "eval_deadline_s", 0.01)
    with pytest.raises(WorkersLost, match=r"its share was not played after loop\.eval_deadline_s=0\.01"):
        await pool.evaluate(4, 1, temperature=0.7)


async def test_the_share_of_a_worker_that_died_is_played_by_its_peer(run: Any) -> None:
    pool, _, _ = run
    os.kill(pool.members["rollout-1"].info["pid"], signal.SIGKILL)
    episodes = await pool.evaluate(5, 1, temperature=0.7)
    assert sorted(t.group_id for t in episodes) == [f"eval-{i}" for i in range(5)]


async def test_held_out_tasks_wait_for_those_that_replace_the_last_workers(run: Any) -> None:
    pool, _, _ = run
    os.kill(pool.members["rollout-0"].info["pid"], signal.SIGKILL)  # the other died in the test before
    with pytest.raises(WorkersLost, match="no rollout worker could play"):  # nobody replaces them
        await pool.evaluate(5, 1, temperature=0.7)
    watching = asyncio.create_task(pool.watch())
    try:
        await asyncio.sleep(0)
        episodes = await pool.evaluate(5, 1, temperature=0.7)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert sorted(t.group_id for t in episodes) == [f"eval-{i}" for i in range(5)]


async def test_a_stopped_pool_leaves_no_actor(run: Any) -> None:
    pool, _, _ = run
    actors = [member.actor for member in pool.members.values()]
    await pool.stop()
    for actor in actors:
        with pytest.raises(RayActorError):
            await actor.ping.remote()
