"""A thousand episodes that wait for a tool on one real worker with 32 places: what they cost, and that they hold nobody up."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from tests.requirements import need

need("ray", "vllm")

import ray
from transformers import AutoModelForCausalLM

from actors.replay import ReplaySettings
from actors.replay import actor as replay
from actors.worker_pool import WorkerPool
from tests.integration import tiny_engines
from tests.integration.eager_policy import write_eager_model
from toolrl import presets
from toolrl.trajectory import Trajectory

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

GROUPS, GROUP_SIZE = 126, 8
EPISODES = GROUPS * GROUP_SIZE
SETTINGS = [
    "name=thousand",
    "rollout.workers=1",
    "rollout.concurrency=32",
    "rollout.park_after_s=0.05",
    "rollout.parser=tests.integration.sleepy:SleepyEager",
    "rollout.max_turn_tokens=120",
    "rollout.max_response_tokens=400",
    "rewards.components=[{name: outcome}]",
    f"loop.groups_per_step={GROUPS // 2}",
    f"loop.group_size={GROUP_SIZE}",
    "loop.steps=1000",
    "buffer.drop_uniform_groups=false",
    "buffer.max_staleness=1",
    "learner.updates_per_batch=1",
]


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


async def until(there: Any, deadline_s: float, pause_s: float = 0.2) -> Any:
    end = time.monotonic() + deadline_s
    while not (found := await there()):
        assert time.monotonic() < end, "not within the deadline"
        await asyncio.sleep(pause_s)
    return found


async def trained(buffer: Any, step: int, version: int) -> list[Trajectory]:
    batch = await buffer.wait_for_batch.remote("learner", GROUPS // 2, version, timeout_s=90, patience_s=90)
    assert batch is not None, await buffer.waiting_for.remote()
    await buffer.ack.remote(batch.batch_id, step, version)
    return [member for group in batch.trajectories() for member in group]


async def test_a_thousand_parked_episodes_cost_little_and_hold_nobody_up(
    tmp_path: Path, record_property: Any, capsys: Any
) -> None:
    alarm = tmp_path / "alarm"
    tool = f"tools=[{{name: 'tests.integration.sleepy:Sleepy', timeout_s: 600, options: {{alarm: '{alarm}'}}}}]"
    config = presets.load("quickstart-cpu", [*SETTINGS, tool, f"runs_dir={tmp_path}"])
    model_dir = tmp_path / "model"
    write_eager_model(model_dir, 0)
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="toolrl",
        object_store_memory=80 * 2**20,
    )  # fmt: skip
    buffer = await asyncio.to_thread(
        replay.start, "thousand/replay", tmp_path / "ledger.sqlite", ReplaySettings.of(config)
    )
    pool = await WorkerPool.start(config, str(model_dir), buffer)
    try:
        (member,) = pool.members.values()
        before_mib, began = resident_mib(member.info["pid"]), time.monotonic()
        pool.begin()

        async def all_parked() -> dict[str, Any] | None:
            (stats,) = await pool.stats()
            return stats if stats["parked"] == EPISODES else None

        stats = await until(all_parked, 90)
        parked_after_s = time.monotonic() - began
        # They hold no place, and count as generating: no more is admitted.
        assert (stats["running"], stats["waiting"], stats["finished_episodes"]) == (0, 0, 0)
        ledger = await buffer.ledger.remote()
        assert ledger.balances and ledger.running == EPISODES

        pings, lags = [], []
        for _ in range(20):
            asked = time.monotonic()
            await member.actor.ping.remote()
            pings.append(time.monotonic() - asked)
            lags.append((await pool.stats())[0]["loop_lag_s"])
            await asyncio.sleep(0.05)
        grown_mib = resident_mib(member.info["pid"]) - before_mib

        # A weight update does not wait for them.
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")
        asked = time.monotonic()
        (await pool.publish(tiny_engines.publication(model, 1, 1 << 20))).require_all()
        publish_s = time.monotonic() - asked
        await buffer.set_version.remote(1)
        assert (await pool.stats())[0]["parked"] == EPISODES

        alarm.touch()
        woken = time.monotonic()
        episodes = await trained(buffer, 1, 1) + await trained(buffer, 2, 1)
        resumed_s = time.monotonic() - woken
        assert len({t.id for t in episodes}) == EPISODES == len(episodes)
        for t in episodes:
            first, shown, last = t.turns
            assert set(first.weight_versions) == {0} and set(last.weight_versions) == {1}
            assert [r.text for r in shown.results] == ["good morning"] and t.timings["parked_s"] > 0
        ledger = await buffer.ledger.remote()
        assert ledger.balances and not ledger.dropped and not ledger.reissued
        figures = {
            "parked_after_s": parked_after_s,
            "grown_mib": grown_mib,
            "kib_per_parked_episode": grown_mib * 1024 / EPISODES,
            "loop_lag_ms_median": 1000 * statistics.median(lags),
            "ping_ms_median": 1000 * statistics.median(pings),
            "publish_s": publish_s,
            "resumed_s": resumed_s,
        }
        for name, value in figures.items():
            record_property(name, value)
        with capsys.disabled():
            print("\n" + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
        assert grown_mib < 200
        assert statistics.median(lags) < 0.25 and statistics.median(pings) < 0.1
        assert publish_s < 10
    finally:
        await pool.stop()
        replay.stop("thousand/replay")
        ray.shutdown()
