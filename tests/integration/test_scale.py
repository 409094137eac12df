"""More and fewer rollout workers on a live run: episodes go on where they were, none is lost, none comes twice. Real Ray,
engines, interpreters and buffer; the learner only acknowledges. A killed worker's episodes: test_worker_pool.py."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from tests.requirements import need

need("ray", "vllm")

import ray
from transformers import AutoModelForCausalLM

from actors.replay import ReplaySettings
from actors.replay import actor as replay
from actors.worker_pool import WorkerPool
from actors.worker_scaling import WorkerScaling
from tests.integration import tiny_engines
from tests.integration.eager_policy import write_eager_model
from toolrl import presets
from toolrl.app.control import taking_orders
from toolrl.app.live_orders import orders
from toolrl.app.pausing import Pausing
from toolrl.app.run_folder import RunFolder
from toolrl.placement import PlacementError
from toolrl.trajectory import Trajectory
from toolrl.trajectory_codec import encode

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

SETTINGS = [
    "name=scale",
    "rollout.workers=1",
    "rollout.concurrency=4",  # so that a busy worker leaves a core to the one that starts
    "rollout.parser=tests.integration.eager_policy:SlowEager",
    "rollout.max_turn_tokens=60",
    "rollout.max_response_tokens=400",
    "rollout.lease_s=20",
    "rollout.hand_over_grace_s=5",
    "sandbox.backend=process",
    "sandbox.min_sessions=4",
    "sandbox.max_sessions=8",
    "rewards.components=[{name: outcome}]",
    "loop.groups_per_step=2",
    "loop.group_size=4",
    "loop.steps=1000",
    "buffer.max_staleness=500",
]


@dataclass
class Run:
    """A live run without a learner: whatever is ready is trained by name, and the account is looked at all the time."""

    folder: RunFolder
    pool: WorkerPool
    buffer: Any
    model_dir: str
    trained: list[Trajectory] = field(default_factory=list)
    version: int = 0
    looks: int = 0

    async def train(self) -> None:
        step = 0
        while True:
            batch = await self.buffer.wait_for_batch.remote("learner", 2, self.version, timeout_s=60, patience_s=60)
            assert batch is not None, await self.buffer.waiting_for.remote()
            step += 1
            await self.buffer.ack.remote(batch.batch_id, step, self.version)
            self.trained += [member for group in batch.trajectories() for member in group]

    async def keep_account(self) -> None:
        while True:
            ledger = await self.buffer.ledger.remote()
            assert ledger.balances, str(ledger)
            assert not ledger.dropped, str(ledger)
            self.looks += 1
            await asyncio.sleep(0.1)

    async def until(self, there: Any, since: int | None = None, deadline_s: float = 60.0) -> Any:
        """Waits for the first trained trajectory, from now or number `since` on, that is wanted."""
        seen, end = len(self.trained) if since is None else since, time.monotonic() + deadline_s
        while time.monotonic() < end:
            for trajectory in self.trained[seen:]:
                if there(trajectory):
                    return trajectory
            seen = len(self.trained)
            await asyncio.sleep(0.05)
        raise AssertionError(f"not among {len(self.trained)} trajectories; {await self.buffer.waiting_for.remote()}")

    @property
    def stored_workers(self) -> int:
        return presets.load(str(self.folder.path / "config.yaml"), []).rollout.workers

    async def command(self, workers: int) -> subprocess.CompletedProcess[str]:
        """`toolrl scale` from another process."""
        words = ["scale", str(self.folder.path), "--rollout-workers", str(workers)]
        command = [sys.executable, "-m", "toolrl.app.cli", *words]
        return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = presets.load("quickstart-cpu", [*SETTINGS, f"runs_dir={tmp_path_factory.mktemp('runs')}"])
    folder = RunFolder.create(config)
    write_eager_model(folder.model, 0)
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="toolrl",
        object_store_memory=80 * 2**20,
    )  # fmt: skip
    buffer = await asyncio.to_thread(replay.start, "scale/replay", folder.ledger, ReplaySettings.of(config))
    pool = await WorkerPool.start(config, str(folder.model), buffer)
    run = Run(folder, pool, buffer, str(folder.model))
    with folder.held():
        pool.begin()
        async with taking_orders(folder.path, orders(SimpleNamespace(workers=pool, folder=folder), Pausing())):  # type: ignore[arg-type]
            at_work = [asyncio.create_task(work) for work in (run.train(), run.keep_account(), pool.watch())]
            try:
                yield run
            finally:
                failed = [task.exception() for task in at_work if task.done()]
                for task in at_work:
                    task.cancel()
                await asyncio.gather(*at_work, return_exceptions=True)
                await pool.stop()
                replay.stop("scale/replay")
                ray.shutdown()
                assert not failed, failed


async def publish(run: Run, version: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(run.model_dir, dtype="float32")
    (await run.pool.publish(tiny_engines.publication(model, version, 1 << 20))).require_all()
    run.version = version
    await run.buffer.set_version.remote(version)


def versions_of(trajectory: Trajectory) -> set[int]:
    return {version for turn in trajectory.policy_turns for version in turn.weight_versions}


async def test_a_worker_that_joins_gets_the_latest_weights_before_it_takes_work(run: Run) -> None:
    await run.until(lambda t: len(t.policy_turns) > 2)  # episodes take several turns here
    await publish(run, 1)
    done = await run.command(2)
    assert done.returncode == 0, done.stderr
    assert run.stored_workers == 2
    assert "starting rollout-1" in done.stdout and "has 2 rollout workers: rollout-0, rollout-1" in done.stdout
    first = await run.until(lambda t: t.metadata["worker"] == "rollout-1")
    by_the_new = [t for t in run.trained if t.metadata["worker"] == "rollout-1"]
    assert first in by_the_new and {v for t in by_the_new for v in versions_of(t)} == {1}


async def test_a_worker_that_leaves_hands_its_episodes_back_and_the_others_go_on(run: Run) -> None:
    await run.until(lambda t: t.metadata["worker"] == "rollout-1")
    before = len(run.trained)
    done = await run.command(1)
    assert done.returncode == 0, done.stderr
    assert "rollout-1 has left; " in done.stdout and "rollout-1 has left; 0" not in done.stdout
    assert list(run.pool.members) == ["rollout-0"]
    taken_up = await run.until(lambda t: "continued_after" in t.metadata, since=before)
    assert taken_up.metadata["worker"] == "rollout-0" and taken_up.outcome.trained
    assert "worker_lost" not in (await run.buffer.ledger.remote()).reissued  # handed over is no failed try
    assert len(run.trained) > before


async def test_more_than_there_is_room_for_is_refused_at_once_and_named(run: Run) -> None:
    started = time.monotonic()
    done = await run.command(40)
    assert done.returncode == 2 and time.monotonic() - started < 30  # of which Python's own start, on busy cores
    assert run.stored_workers == 1  # what `--resume` would start with
    assert "39 more rollout workers cannot be placed" in done.stderr
    assert "CPU: needs 39 (39 × rollout worker), there is 1" in done.stderr
    started = time.monotonic()
    with pytest.raises(PlacementError):
        await WorkerScaling(run.pool).to(3)
    assert time.monotonic() - started < 10
    assert list(run.pool.members) == ["rollout-0"] and run.pool.wanted == 1


async def test_none_was_lost_and_none_came_twice(run: Run) -> None:
    assert len({t.id for t in run.trained}) == len(run.trained) > 0
    ledger = await run.buffer.ledger.remote()
    assert ledger.balances and not ledger.dropped and run.looks > 50
    assert await run.buffer.audit.remote() == []
    for trajectory in run.trained:
        trajectory.check()
        assert len(trajectory.policy_mask()) == len(trajectory.response_ids) and encode(trajectory)
        cells = [r.text for turn in trajectory.turns for r in turn.results if r.status == "ok"]
        assert [text.split()[1] for text in cells] == [str(n + 1) for n in range(len(cells))]  # variables moved with it
