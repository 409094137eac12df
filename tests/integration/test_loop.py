"""The whole loop on real parts: two learner ranks, two engines, sandbox, buffer. One start serves every test, in order."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from tests.requirements import need

need("ray", "vllm", "deepspeed")

from learner.sequence import sequences_from
from toolrl import presets
from toolrl.app import train as loop
from toolrl.app.model_folder import prepare_model
from toolrl.app.monitor import monitor_run
from toolrl.app.ood import OodPlan
from toolrl.app.parts import Parts, start_parts
from toolrl.app.run_folder import RunFolder
from toolrl.app.viewer.curves import read_evaluations
from toolrl.app.viewer.view import View
from toolrl.config import RunConfig
from toolrl.errors import RunError
from toolrl.monitors.known_metrics import known
from toolrl.monitors.metrics_log import read_metrics
from toolrl.trajectory import Trajectory

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(420)]

STEPS = 3
PROMISED_METRICS = """
    step version time_s reward/mean reward/std tool/call_rate tool/calls_per_trajectory format/healthy staleness/mean
    tokens/policy loss/policy ratio/max ratio/clip_fraction grad/norm entropy/mean gap/mean
    time/rollout_s time/learn_s time/publish_s
    reward/component/outcome reward/component/code_similarity reward/component/interaction reward/share/interaction
    control/mass_outside control/tool_call/logp_mean entropy/decision ess signal/groups_without interaction/tasks_both_ways
"""
SETTINGS = [
    "name=loop",
    "seed=3",
    "quiet=true",
    "learner.ranks=2",
    "learner.zero_stage=2",
    "learner.updates_per_batch=2",
    "rollout.workers=2",
    "rollout.temperature=0.6",
    "rollout.concurrency=16",
    "cold_start.steps=60",
    "cold_start.traces=256",
    "cold_start.learning_rate=1e-3",  # moderate weights: float32 rounding then stays well below what a wrong path would show
    "tasks.held_out_tasks=48",  # so many that a policy of little practice calls in every variant
    f"loop.steps={STEPS}",
    "loop.groups_per_step=4",
    "loop.group_size=4",
    "loop.checkpoint_every_steps=2",
    "buffer.drop_uniform_groups=false",
    "rewards.components.3=interaction",
    "rollout.max_context_tokens=640",  # the other call format takes a longer prompt
    "weights.transport=gloo",
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return presets.load("quickstart-cpu", [*SETTINGS, f"runs_dir={tmp_path_factory.mktemp('runs')}"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(config: RunConfig):
    folder = RunFolder.create(config)
    prepare_model(config)
    with View(config, folder) as view:
        async with start_parts(config, folder) as parts:
            yield parts, await loop.begin(parts, view), view


async def largest_gap(parts: Parts, episodes: list[Trajectory]) -> float:
    """The largest |trainer − engine| over all sampled tokens, in log-probability."""
    sequences = sequences_from(episodes, [[0.0] * len(t.policy_turns) for t in episodes])
    assert sum(int(s.policy_mask.sum()) for s in sequences) > 100
    trainer = await parts.learner.logprobs(sequences)
    return max(
        float(np.abs(mine[s.policy_mask] - s.rollout_logp[s.policy_mask]).max())
        for s, mine in zip(sequences, trainer, strict=True)
    )


async def test_trainer_and_engine_agree_on_every_token_before_the_first_update(run) -> None:
    parts, progress, _ = run
    episodes = await parts.workers.evaluate(12, 2, temperature=0.6)
    assert {v for t in episodes for turn in t.policy_turns for v in turn.weight_versions} == {progress.version}
    assert await largest_gap(parts, episodes) < 1e-5


async def test_a_few_steps_train_and_reach_both_engines(run) -> None:
    parts, progress, view = run
    await loop._until_trained(loop.train_policy(parts, progress, view), loop.keep_rollouts_going(parts, progress))
    rows = read_metrics(parts.folder.path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["version"] for row in rows] == [2, 3, 4]  # 1 is the cold start
    assert all(math.isfinite(row["loss/policy"]) and math.isfinite(row["grad/norm"]) for row in rows)
    assert max(row["staleness/max"] for row in rows) <= parts.config.buffer.max_staleness
    assert {each["version"] for each in await parts.workers.stats()} == {progress.version} == {STEPS + 1}
    assert [row["weights/over_group"] for row in rows] == [2, 2, 2]
    assert all(0 < row["weights/pause_s"] < row["weights/update_s"] <= row["time/publish_s"] for row in rows)


async def test_the_metrics_file_holds_what_it_promises(run) -> None:
    parts, _, _ = run
    promised = PROMISED_METRICS.split()
    for row in read_metrics(parts.folder.path):
        assert not [name for name in promised if name not in row]
        assert not [name for name in row if known(name) is None]


async def test_monitors_read_again_are_those_of_the_run(run) -> None:
    parts, _, _ = run
    steps = monitor_run(parts.folder.path)
    assert [(step.step, step.read == step.trained > 0) for step in steps] == [(1, True), (2, True), (3, True)]
    for step in steps:
        assert step.differing == []
        assert (step.origins["tool/call_rate"], step.origins["control/mass_outside"]) == ("recomputed", "stored")


async def test_both_engines_hold_the_learners_weights(run) -> None:
    parts, _, _ = run
    of_engines = await parts.workers.checksums()
    assert len(of_engines) == 2
    assert len({str(sums) for sums in of_engines.values()}) == 1
    publication = await parts.learner.publish(99)
    delivered = await asyncio.gather(
        *(_applied(member.actor, publication) for member in parts.workers.members.values())
    )
    assert {report["checksum"] for report in delivered} == {publication.checksum} != {""}
    assert await parts.workers.checksums() == of_engines  # the same weights again, whole


async def _applied(actor, publication) -> dict:
    return await actor.update_weights.remote(publication)


async def test_a_repeated_prompt_after_an_update_is_answered_by_the_new_weights(run) -> None:
    parts, _, _ = run
    episodes = await parts.workers.evaluate(12, 2, temperature=0.6)  # the prompts of the first test, cached then
    assert await largest_gap(parts, episodes) < 1e-5


async def test_the_ledger_balances_and_every_step_is_in_it(run) -> None:
    parts, _, _ = run
    ledger = await parts.buffer.ledger.remote()
    assert ledger.balances
    assert ledger.trained == STEPS * 4 * 4
    assert await parts.buffer.audit.remote() == []


async def test_a_batch_that_does_not_come_in_time_ends_the_run_with_what_it_waited_for(run) -> None:
    parts, progress, _ = run
    config = replace(parts.config, loop=replace(parts.config.loop, batch_deadline_s=1.0))
    later = replace(progress, version=progress.version + 1000)  # what is ready is too old for it
    with pytest.raises(loop.BatchLate, match=r"no batch for step 4 in loop\.batch_deadline_s=1 s: \w+") as late:
        await loop.next_batch(replace(parts, config=config), later)
    assert isinstance(late.value, RunError)  # which the command line tells in words, with code 1


async def test_every_variant_is_played_out_of_distribution_on_the_engines_that_are_there(run) -> None:
    parts, progress, view = run
    engines = {name: member.info["pid"] for name, member in parts.workers.members.items()}
    before = {t.id: t for t in await parts.workers.evaluate(12, 1, temperature=0.6)}
    await loop.evaluate(parts, progress, view, out_of_distribution=True)
    compared = read_evaluations(parts.folder.path)[-1]["ood"]
    assert (list(compared["variants"]), compared["left_out"]) == ([part.name for part in parts.config.eval.ood], {})
    for row in (compared["in_distribution"], *compared["variants"].values()):
        assert row["tasks"] == 48
    assert compared["in_distribution"]["tool_call_rate"] > 0.05
    failing = compared["variants"]["tool_failures"]["all"]["tool_failure_rate"]
    assert failing > progress.evaluations[-1]["all"]["tool_failure_rate"]
    (renamed,) = [
        part.config for part in OodPlan.of(parts.config, parts.folder.model).planned if part.name == "renamed_tools"
    ]
    asked = await parts.workers.evaluate(48, 4, 0.6, renamed)
    called = [result for t in asked for of_turn in t.results_of_turns() for result in of_turn if result.name]
    assert called  # a policy that knows the old name by heart is told of the new one
    assert all(
        (result.status == "invalid_call") == (result.name == "python") for result in called if not result.injected
    )
    assert {name: member.info["pid"] for name, member in parts.workers.members.items()} == engines
    again = await parts.workers.evaluate(12, 1, temperature=0.6)
    assert all(t.response_ids == before[t.id].response_ids for t in again)


async def test_a_checkpoint_holds_the_run_and_the_export_loads(run) -> None:
    from transformers import AutoModelForCausalLM

    parts, _, _ = run
    state = parts.folder.latest_checkpoint()
    assert state is not None
    assert (state.step, state.version) == (STEPS, STEPS + 1)
    before = await parts.learner.checksums()
    await parts.learner.load(str(state.path))
    assert await parts.learner.checksums() == before
    await parts.learner.export(str(parts.folder.final))
    model = AutoModelForCausalLM.from_pretrained(parts.folder.final)
    assert sum(p.numel() for p in model.parameters()) > 100_000


async def test_a_placement_that_cannot_be_satisfied_fails_at_once(config: RunConfig, tmp_path: Path) -> None:
    from toolrl.placement import PlacementError, missing, needed

    short = missing(needed(replace(config, learner=replace(config.learner, ranks=64)), "cpu"), {"CPU": 2})
    assert any("64" in line for line in short)
    assert issubclass(PlacementError, ValueError)
