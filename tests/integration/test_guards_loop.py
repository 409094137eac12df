"""One short real run in which a guard of every kind acts, one after the other: what set it off, what it changed, and that it
ended. Staleness 0, so that each step's batch is of one version of the weights and every firing is known beforehand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import pytest_asyncio

from tests.requirements import need

need("ray", "vllm", "deepspeed")

import torch

from actors.replay import read_ledger
from toolrl import presets
from toolrl.app import control
from toolrl.app import train as loop
from toolrl.app.guarding import Guarding
from toolrl.app.model_folder import prepare_model
from toolrl.app.parts import start_parts
from toolrl.app.run_folder import RunFolder
from toolrl.app.viewer.view import View
from toolrl.config import RunConfig
from toolrl.guards.journal import read_journal
from toolrl.ledger import Ledger
from toolrl.monitors.metrics_log import read_metrics

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

STEPS, GROUPS, SIZE = 7, 2, 4
RATE, LLDS, KL = 4e-3, 0.5, 0.25
BY_STEP = {"metric": "optimizer_steps", "window": 1, "cool_down_steps": 100}  # two a step


def rule(name: str, condition: str, threshold: float, action: str, **options: Any) -> dict[str, Any]:
    named = {"name": action, "options": options}
    return {**BY_STEP, "name": name, "condition": condition, "threshold": threshold, "action": named}


RULES = [
    rule("rate", "below", 3, "lower_lr", steps=1, fade=0.0),  # step 1; back after step 2
    {**rule("pull", "below", 5, "kl", weight=KL, steps=1, fade=0.0), "min_steps": 1},  # step 2; back after step 3
    {**rule("hold", "below", 5, "llds", weight=LLDS, steps=1, fade=0.0), "min_steps": 1},
    {
        **rule("sick", "above", 0.5, "reject_batch"),
        "metric": "reward/component/sampled_by",
        "cool_down_steps": 1,
    },  # step 3
    rule("burst", "above", 5, "sft_burst", steps=3, batch_size=8, learning_rate=2e-3),  # step 3
    rule("back", "above", 7, "roll_back", margin_steps=1),  # step 4
    rule("halt", "above", 9, "pause", deadline_s=60.0),  # step 5
    rule("back-again", "above", 11, "roll_back", most_in_a_row=1),  # step 6: one too many, so it pauses
]
SETTINGS = [
    "name=guards",
    "seed=3",
    "quiet=true",
    "learner.updates_per_batch=2",
    "learner.schedule=constant",
    f"learner.learning_rate={RATE}",
    "rollout.concurrency=8",
    "rollout.max_response_tokens=96",
    "rollout.max_turns=2",
    "sandbox.backend=process",
    "sandbox.min_sessions=2",
    "sandbox.max_sessions=4",
    "algorithm.advantage=grpo",
    "rewards.components=['tests.integration.own_rewards:evenness',"
    " {name: 'tests.integration.own_rewards:sampled_by', options: {version: 3}}]",
    "buffer.max_staleness=0",
    "buffer.drop_uniform_groups=false",
    "cold_start.steps=4",
    "cold_start.traces=48",
    "cold_start.direct_guess_share=0",
    "cold_start.malformed_call_share=0",
    "cold_start.wrong_code_share=0",
    "cold_start.retry_share=0",
    "tasks.held_out_tasks=0",
    f"loop.steps={STEPS}",
    f"loop.groups_per_step={GROUPS}",
    f"loop.group_size={SIZE}",
    "loop.checkpoint_every_steps=1",
    "loop.keep_checkpoints=10",
    f"guards.rules={json.dumps(RULES)}",
]


class Attended(View):
    """A run's view with a person before it."""

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        super().__init__(config, folder)
        self.paused = asyncio.Event()

    def stage(self, text: str) -> None:
        super().stage(text)
        if text.startswith("paused"):
            self.paused.set()

    async def continue_when_paused(self) -> None:
        for roll_back, reason in ((False, "halt: optimizer_steps is 10"), (True, "1 roll-backs in a row")):
            await self.paused.wait()
            self.paused.clear()
            why = await asyncio.to_thread(control.give_order, self.folder.path, "continue", {"roll_back": roll_back})
            assert reason in why


class Run:
    """What is left of the run when it is over."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.rows = {int(row["step"]): row for row in read_metrics(folder.path)}
        self.journal = read_journal(folder.path)
        self.ledger: Ledger = read_ledger(folder.ledger)

    def told(self, rule: str, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.journal if (line["rule"], line["kind"]) == (rule, kind)]

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        (path,) = self.folder.checkpoint(step).rglob("mp_rank_00_model_states.pt")
        found: dict[str, torch.Tensor] = torch.load(path, weights_only=False)["module"]
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory):
    config = presets.load("quickstart-cpu", [*SETTINGS, f"runs_dir={tmp_path_factory.mktemp('runs')}"])
    folder = RunFolder.create(config)
    prepare_model(config)
    with folder.held(), Attended(config, folder) as view:
        async with start_parts(config, folder) as parts:
            progress = await loop.begin(parts, view)
            someone = asyncio.create_task(view.continue_when_paused())
            await loop._until_trained(
                loop.train_policy(parts, progress, view), loop.keep_rollouts_going(parts, progress)
            )
            await someone
            assert await parts.buffer.audit.remote() == []
            assert {each["version"] for each in await parts.workers.stats()} == {progress.version}
            again = await loop.restore(parts, view)
            guarding = await Guarding.start(parts, again, view)
            found = Run(folder)
            found.resumed = guarding  # type: ignore[attr-defined]
            yield found


async def test_every_guard_acted_once_at_its_step(run: Run) -> None:
    fired = [f"{line['step']} {line['rule']}" for line in run.journal if line["kind"] == "seen"]
    assert fired == ["1 rate", "2 pull", "2 hold", "3 sick", "3 burst", "4 back", "5 halt", "6 back-again"]
    assert [len(run.told(rule["name"], "done")) for rule in RULES] == [1, 1, 1, 1, 1, 1, 1, 2]
    assert [run.rows[step]["guard/back"] for step in run.rows] == [0, 0, 0, 1, 0, 0, 0]


async def test_the_learning_rate_is_halved_for_one_step(run: Run) -> None:
    assert [run.rows[step]["lr"] / RATE for step in run.rows] == pytest.approx([1, 0.5, 1, 1, 1, 1, 1])
    assert [run.rows[step]["controls/lr_factor"] for step in run.rows] == [1, 0.5, 1, 1, 1, 1, 1]
    (ended,) = run.told("rate", "ended")[1:]
    assert (ended["step"], ended["what"], ended["value"]) == (2, "action", 1.0)


async def test_kl_and_llds_are_in_the_loss_for_one_step(run: Run) -> None:
    assert [step for step, row in run.rows.items() if "kl/mean" in row] == [3]
    assert [step for step, row in run.rows.items() if "loss/llds" in row] == [3]
    assert run.rows[3]["kl/mean"] > 0 and run.rows[3]["controls/kl_weight"] == KL
    assert {line["step"] for rule in ("pull", "hold") for line in run.told(rule, "ended")} == {3}


async def test_a_rejected_batch_is_not_trained_and_the_ledger_says_so(run: Run) -> None:
    assert run.ledger.balances
    assert run.ledger.dropped == {"rejected": GROUPS * SIZE}
    assert run.ledger.trained == STEPS * GROUPS * SIZE
    assert [run.rows[step]["guards/rejected_batches"] for step in run.rows] == [0, 0, 1, 0, 0, 0, 0]


async def test_a_burst_trains_on_references_and_reaches_the_engines(run: Run) -> None:
    (done,) = run.told("burst", "done")
    assert len(done["losses"]) == 3 and done["losses"][-1] < done["losses"][0]
    assert done["version"] == run.rows[3]["version"] + 1
    assert run.rows[4]["version"] == done["version"] + 1
    assert run.rows[4]["staleness/max"] == 0  # what older weights had begun was sampled again


async def test_a_roll_back_brings_the_weights_of_the_last_good_checkpoint_under_a_new_version(run: Run) -> None:
    (done,) = run.told("back", "done")
    states = {state.step: state for state in run.folder.checkpoint_states()}
    good = [step for step, state in states.items() if state.is_good and step < 4]
    assert done["to_step"] == max(good) == 2  # at step 3 a batch was rejected
    assert states[4].is_good and states[4].version == done["version"] > run.rows[4]["version"]
    then, now, bad = run.weights(2), run.weights(4), run.weights(3)
    assert all(torch.equal(then[name], now[name]) for name in then)
    assert not all(torch.equal(bad[name], now[name]) for name in bad)
    assert run.rows[5]["version"] == done["version"] + 1 and run.rows[5]["staleness/max"] == 0
    assert run.rows[5]["optimizer_steps"] == 10  # the schedule does not go back


async def test_a_pause_waits_for_somebody_and_ends(run: Run) -> None:
    (ended,) = [line for line in run.told("halt", "ended") if line["what"] == "action"]
    assert ended["answer"] == "continue" and max(run.rows) == STEPS


async def test_a_roll_back_too_many_pauses_and_a_person_may_order_it(run: Run) -> None:
    paused, went_back = run.told("back-again", "done")
    assert "have not helped" in paused["text"] and went_back["to_step"] == 4
    assert torch.equal(*(next(iter(run.weights(step).values())) for step in (4, 6)))
    assert {state.step: state.is_good for state in run.folder.checkpoint_states()}[6], "of the good weights, in the end"


async def test_a_resumed_run_has_the_guards_and_controls_of_its_checkpoint(run: Run) -> None:
    guarding: Guarding = run.resumed  # type: ignore[attr-defined]
    assert guarding.progress.step == STEPS
    assert {name: guarding.guards.watched(name).fired for name in guarding.guards.rules} == dict.fromkeys(
        guarding.guards.rules, 1
    )
    assert guarding.controls.turned == {}
