"""One short real run with every supervision signal on. Staleness 0, so that each batch is of one version of the weights."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.requirements import need

need("ray", "vllm", "deepspeed")

from actors.replay import read_ledger, read_trajectories
from actors.worker_setup import Setup
from toolrl import presets
from toolrl.app import reference_sources
from toolrl.app import train as loop
from toolrl.app.lessons import supervised_sequences
from toolrl.app.model_folder import prepare_model
from toolrl.app.parts import start_parts
from toolrl.app.run_folder import RunFolder
from toolrl.app.supervising import teach
from toolrl.app.viewer.view import View
from toolrl.monitors.metrics_log import read_metrics
from toolrl.supervision.guidance import guided_by
from toolrl.supervision.hints import hinted_task, without_hint

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

STEPS, GROUPS, SIZE = 3, 2, 4
HINT = "Call python first."
SETTINGS = [
    "name=supervised",
    "seed=3",
    "quiet=true",
    "learner.updates_per_batch=1",  # so that every ratio is 1
    "learner.learning_rate=1e-3",
    "learner.schedule=constant",
    "algorithm.advantage=grpo",
    "rollout.concurrency=8",
    "rollout.max_response_tokens=96",
    "rollout.max_turns=2",
    "sandbox.backend=process",
    "sandbox.min_sessions=2",
    "sandbox.max_sessions=4",
    "buffer.max_staleness=0",
    "buffer.drop_uniform_groups=false",
    "cold_start.steps=2",
    "cold_start.traces=32",
    "tasks.held_out_tasks=0",
    f"supervision.references.solved_tasks={STEPS * GROUPS}",
    "supervision.off_policy.per_group=1",
    f"supervision.hint={{per_group: 1, text: {HINT}}}",
    "supervision.erroneous={enabled: true, learning_rate: 2e-3}",
    "supervision.interleaved={every_steps: 2, steps: 2, batch_size: 8, learning_rate: 2e-3}",
    f"loop.steps={STEPS}",
    f"loop.groups_per_step={GROUPS}",
    f"loop.group_size={SIZE}",
    "loop.checkpoint_every_steps=1",
    "loop.keep_checkpoints=10",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory):
    config = presets.load("quickstart-cpu", [*SETTINGS, f"runs_dir={tmp_path_factory.mktemp('runs')}"])
    folder = RunFolder.create(config)
    prepare_model(config)
    with folder.held(), View(config, folder) as view:
        async with start_parts(config, folder) as parts:
            progress = await loop.begin(parts, view)
            await loop._until_trained(
                loop.train_policy(parts, progress, view), loop.keep_rollouts_going(parts, progress)
            )
            yield parts, view


def rows(parts: Any) -> list[dict[str, float]]:
    return read_metrics(parts.folder.path)


async def test_each_group_holds_a_reference_and_a_hinted_sample_beside_the_policys_own(run) -> None:
    parts, _ = run
    setup = Setup.of(parts.config, parts.folder.model)
    trained = list(read_trajectories(parts.folder.ledger))
    assert len(trained) == STEPS * GROUPS * SIZE
    for index in range(STEPS * GROUPS):
        group = [each for each in trained if each.group_id == f"g{index:06d}"]
        assert [guided_by(each) for each in group] == [None, None, "hint", "reference"]
        task = setup.tasks.task(index)
        bare, hinted = (setup.chat.prompt_ids(each.messages) for each in (task, hinted_task(task, HINT)))
        assert [each.prompt_ids for each in group] == [bare, bare, hinted, bare]
        assert [without_hint(each).prompt_ids for each in group] == [bare] * SIZE
        assert group[3].rewards["outcome"] == 1.0 and group[3].policy_turns[0].calls
    assert [row["supervision/seats/reference"] for row in rows(parts)] == [1 / SIZE] * STEPS
    assert [row["supervision/seats/hint"] for row in rows(parts)] == [1 / SIZE] * STEPS


async def test_ratios_and_the_gap_between_engine_and_trainer_are_those_of_on_policy_data(run) -> None:
    """Of the hinted samples too, whose two prompts differ, and after the supervised steps, which the engines must know."""
    parts, _ = run
    for row in rows(parts):
        assert row["ratio/max"] == pytest.approx(1.0, abs=1e-6)
        assert row["gap/max"] < 1e-4
        assert row["staleness/max"] == 0.0


async def test_the_account_balances_with_the_references_as_samples_of_their_seats(run) -> None:
    parts, _ = run
    ledger = read_ledger(parts.folder.ledger)
    assert ledger.balances and ledger.trained == ledger.issued == STEPS * GROUPS * SIZE
    assert await parts.buffer.audit.remote() == []


async def test_failed_tasks_are_learnt_from_their_references_and_any_task_every_second_step(run) -> None:
    parts, _ = run
    trained = list(read_trajectories(parts.folder.ledger))
    for step, row in enumerate(rows(parts)):
        groups = [f"g{index:06d}" for index in range(step * GROUPS, (step + 1) * GROUPS)]
        sampled = [each for each in trained if each.group_id in groups and guided_by(each) != "reference"]
        failed = sum(all(each.rewards["outcome"] < 1 for each in sampled if each.group_id == name) for name in groups)
        assert row["supervision/erroneous/failed_tasks"] == row["supervision/erroneous/references"] == failed
        assert row["supervision/erroneous/steps"] == (failed > 0)
    assert sum(row["supervision/erroneous/steps"] for row in rows(parts)) > 0, (
        "a policy that has learnt next to nothing"
    )
    assert [row["supervision/interleaved/steps"] for row in rows(parts)] == [0.0, 2.0, 0.0]
    assert rows(parts)[1]["supervision/interleaved/references"] == 16.0
    assert rows(parts)[-1]["optimizer_steps"] == STEPS, "supervised steps stand outside the schedule"


async def test_a_supervised_step_minimises_the_mean_negative_log_likelihood_of_its_references(run) -> None:
    parts, _ = run
    drawn = await parts.references.sample.remote(6, random.Random("here/0"))
    sequences = supervised_sequences([replace(each, temperature=0.5) for each in drawn])
    logps = await parts.learner.logprobs(sequences)
    before = np.concatenate([each[s.policy_mask] for each, s in zip(logps, sequences, strict=True)])
    lesson = await teach(parts.learner, parts.references, steps=1, batch_size=6, learning_rate=1e-2, key="here")
    assert lesson.references == 6 and lesson.losses == [pytest.approx(-before.mean(dtype=np.float64), rel=1e-5)]
    after = np.concatenate(
        [each[s.policy_mask] for each, s in zip(await parts.learner.logprobs(sequences), sequences, strict=True)]
    )
    assert after.mean() > before.mean()
    everything, _ = await parts.references.counts.remote()
    whole = await teach(parts.learner, parts.references, steps=0, batch_size=8, learning_rate=0.0, key="here")
    assert whole.references == everything and len(whole.losses) == -(-everything // 8)


async def test_a_resumed_run_has_the_references_that_its_checkpoint_had(run) -> None:
    parts, view = run
    right = [each for each in read_trajectories(parts.folder.ledger) if guided_by(each) is None and each.answer]
    await parts.references.keep.remote(right[:3])  # from after the checkpoint
    progress = await loop.restore(parts, view)
    assert progress.step == STEPS
    resumed = await parts.references.own_state.remote()
    fresh = reference_sources.start(parts.config)
    await reference_sources.fill(fresh, parts.config, parts.folder, view)
    await reference_sources.load_own(fresh, parts.folder.checkpoint(STEPS))
    assert await fresh.own_state.remote() == resumed
    draws = [await each.sample.remote(99, random.Random("draw")) for each in (parts.references, fresh)]
    assert draws[0] == draws[1] and len(draws[0]) >= STEPS * GROUPS
    tasks, own = await fresh.counts.remote()
    assert (rows(parts)[-1]["supervision/references"], rows(parts)[-1]["supervision/references/own"]) == (tasks, own)
