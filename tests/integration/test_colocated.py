"""`placement.mode=colocated` on CPUs: a real run in which engine and learner take turns, and what may come between."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.requirements import need

need("ray", "vllm", "deepspeed")

from actors.replay import read_trajectories
from tests.integration.test_synchronous import GROUPS, SETTINGS, SIZE, STEPS, Silent, plain_loop
from toolrl import presets
from toolrl.app import train as loop
from toolrl.app.model_folder import prepare_model
from toolrl.app.parts import Parts, start_parts
from toolrl.app.progress import Progress
from toolrl.app.run_folder import RunFolder

pytestmark = pytest.mark.timeout(420)

DIES_IN, STOPS_IN = 2, STEPS  # steps in whose learning phase it happens


class Watched(Silent):
    """A view that also keeps the evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[int, dict[str, Any]]] = []

    def evaluated(self, step: int, table: dict[str, Any]) -> None:
        self.tables.append((step, table))


def watch(parts: Parts, progress: Progress) -> list[tuple[str, list[bool]]]:
    """Asks every worker whether its engine sleeps, whenever the learner trains or saves: (call, answers). While it trains,
    a worker dies in one step, and in another somebody asks the run to stop."""
    seen: list[tuple[str, list[bool]]] = []

    def watched(name: str) -> Any:
        real = getattr(parts.learner, name)

        async def asked(*arguments: Any) -> Any:
            seen.append((name, [each["asleep"] for each in await parts.workers.stats()]))
            if name == "train" and progress.step + 1 == DIES_IN:
                (member,) = parts.workers.members.values()
                os.kill(member.info["pid"], signal.SIGKILL)
            if name == "train" and progress.step + 1 == STOPS_IN:
                progress.pausing.stop()
            return await real(*arguments)

        return asked

    parts.learner.train, parts.learner.save = watched("train"), watched("save")  # type: ignore[method-assign]
    return seen


async def test_engine_and_learner_take_turns_and_sample_what_a_plain_loop_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    own = ["placement.mode=colocated", "learner.offload_while_generating=always", "learner.zero_stage=1"]
    own += ["loop.steps=9", "loop.eval_every_steps=2", "rollout.concurrency=8"]
    config = presets.load("quickstart-cpu", [*SETTINGS, *own, f"runs_dir={tmp_path}"])
    folder = RunFolder.create(config)
    prepare_model(config)
    view: Any = Watched()
    async with start_parts(config, folder) as parts:
        start = str(tmp_path / "start")
        with pytest.raises(RuntimeError, match="'save_checkpoint' while engines have its memory"):
            await parts.learner.save(start)
        await parts.turns.learner()
        await parts.learner.save(start)
        progress = await loop.begin(parts, view)
        calls = watch(parts, progress)
        await loop._until_trained(loop.train_policy(parts, progress, view), loop.keep_rollouts_going(parts, progress))

        assert progress.step == STOPS_IN and folder.latest_checkpoint().step == STOPS_IN  # type: ignore[union-attr]
        assert [each["asleep"] for each in await parts.workers.stats()] == [True]  # nobody woke it to end
        assert calls == [("train", [True])] * STEPS + [("save", [True])]
        assert [step for step, _ in view.tables] == [2]
        assert "rollout-0" in parts.workers.members and parts.workers.members["rollout-0"].restarts == 1

        await parts.learner.load(start)
        plain = await plain_loop(parts, config)
    in_the_loop = {(t.group_id, t.sample_index): t for t in read_trajectories(folder.ledger)}
    trained = [in_the_loop[t.group_id, t.sample_index] for t in plain]
    assert len(trained) == STEPS * GROUPS * SIZE
    for found, expected in zip(trained, plain, strict=True):
        assert (found.id, found.response_ids, found.rewards) == (expected.id, expected.response_ids, expected.rewards)
        assert [turn.weight_versions for turn in found.policy_turns] == [
            turn.weight_versions for turn in expected.policy_turns
        ]
    for row in view.rows:
        assert row["staleness/max"] == row["samples/reissued"] == 0.0
        assert row["time/sleep_s"] > 0 and row["time/wake_s"] > 0
    assert [row["worker/asleep"] for row in view.rows] == [1.0, 0.0, 1.0]  # none where the only worker had just died
