"""Staleness 0 is synchronous: the loop's trajectories are those of the plainest loop there is, token by token.

The plain loop knows no buffer, no tickets and no workers: it plays one episode after the other, learns, and gives the
engine the new weights. Same seed, same weights to begin with.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.requirements import need

need("ray", "vllm", "deepspeed")

from actors.engine import Engine
from actors.episode import EpisodeRunner
from actors.replay import read_trajectories
from actors.replay.records import group_name, sample_seed
from actors.seat import Seat
from actors.weights import WeightReceiver
from actors.worker_setup import Setup
from toolrl import presets
from toolrl.app import train as loop
from toolrl.app.model_folder import prepare_model
from toolrl.app.parts import Parts, start_parts
from toolrl.app.run_folder import RunFolder
from toolrl.config import RunConfig
from toolrl.rewards import RewardPipeline
from toolrl.tasks import AnswerChecker
from toolrl.trajectory import Trajectory

pytestmark = pytest.mark.timeout(420)

STEPS, GROUPS, SIZE = 3, 2, 3
SETTINGS = [
    "name=synchronous",
    "seed=5",
    "tools=[calculator]",
    "rewards.components=['tests.integration.own_rewards:evenness']",
    "rollout.max_turns=2",
    "rollout.max_turn_tokens=12",
    "buffer.max_staleness=0",
    "learner.learning_rate=1e-2",  # so that the wrong weights would sample other tokens
    "learner.schedule=constant",  # whatever the number of steps
    "learner.updates_per_batch=1",
    "algorithm.advantage=grpo",
    "cold_start.steps=0",
    "tasks.held_out_tasks=2",
    f"loop.steps={STEPS}",
    f"loop.groups_per_step={GROUPS}",
    f"loop.group_size={SIZE}",
    "loop.checkpoint_every_steps=3",  # payloads are kept as long as a checkpoint may need them
]


class Silent:
    """In place of a run's view; keeps the metrics."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, float]] = []

    def step(self, step: int, version: int, metrics: Mapping[str, float], trajectories: object) -> None:
        self.rows.append(metrics)

    def stage(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...


_played: list[Trajectory] = []  # by the plain loop: the same for every run of these settings


async def plain_loop(parts: Parts, config: RunConfig) -> list[Trajectory]:
    """One episode after the other, then a step, then the next weights. Starts an engine, so it is done once a session."""
    if not _played:
        _played.extend(await _play(parts, config))
    return _played


async def _play(parts: Parts, config: RunConfig) -> list[Trajectory]:
    setup = Setup.of(config, parts.folder.model)
    played: list[Trajectory] = []
    async with contextlib.AsyncExitStack() as stack:
        checker = await stack.enter_async_context(AnswerChecker(config.tasks))
        engine = await Engine.start(
            parts.folder.model,
            config.engine,
            dtype=config.model.dtype,
            max_context_tokens=config.rollout.max_context_tokens,
            seed=config.seed,
            name="plain",
        )
        stack.push_async_callback(engine.stop)
        receiver = WeightReceiver(engine)
        runner = EpisodeRunner(
            engine,
            setup.chat,
            setup.parser,
            setup.toolbox,
            RewardPipeline(config.rewards, checker),
            config.rollout,
            tokenizer=setup.tokenizer,
            answer=config.tasks.answer,
        )
        for step in range(STEPS):
            groups = []
            for task in range(step * GROUPS, (step + 1) * GROUPS):
                seats = [Seat(group_name(task), i, sample_seed(config.seed, task, i)) for i in range(SIZE)]
                groups.append([await runner.run(setup.tasks.task(task), seat) for seat in seats])
            played += [member for group in groups for member in group]
            await loop.learn(cast(Parts, SimpleNamespace(config=config, learner=parts.learner, hints=None)), groups)
            await receiver.apply(await parts.learner.publish(step + 1))
    return played


async def test_staleness_zero_gives_the_trajectories_of_a_plain_synchronous_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    config = presets.load("quickstart-cpu", [*SETTINGS, f"runs_dir={tmp_path}"])
    folder = RunFolder.create(config)
    prepare_model(config)
    view: Any = Silent()
    async with start_parts(config, folder) as parts:
        start = str(tmp_path / "start")
        await parts.learner.save(start)
        before = await parts.learner.checksums()
        progress = await loop.begin(parts, view)
        await loop._until_trained(loop.train_policy(parts, progress, view), loop.keep_rollouts_going(parts, progress))
        assert await parts.buffer.trained_task_indices.remote() == list(range(STEPS * GROUPS))
        after = await parts.learner.checksums()
        in_the_loop = {(t.group_id, t.sample_index): t for t in read_trajectories(folder.ledger)}
        await parts.learner.load(start)
        assert await parts.learner.checksums() == before != after
        plain = await plain_loop(parts, config)
    assert [row["staleness/max"] for row in view.rows] == [0.0] * STEPS
    assert [row["samples/reissued"] for row in view.rows] == [0.0] * STEPS
    assert len(plain) == len(in_the_loop) == STEPS * GROUPS * SIZE
    assert {v for t in plain for turn in t.policy_turns for v in turn.weight_versions} == set(range(STEPS))
    for expected in plain:
        found = in_the_loop[expected.group_id, expected.sample_index]
        assert (found.id, found.task_id, found.prompt_ids) == (expected.id, expected.task_id, expected.prompt_ids)
        assert found.response_ids == expected.response_ids
        assert (found.outcome, found.rewards) == (expected.outcome, expected.rewards)
        for turn, wanted in zip(found.policy_turns, expected.policy_turns, strict=True):
            assert turn.weight_versions == wanted.weight_versions
            assert turn.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)
