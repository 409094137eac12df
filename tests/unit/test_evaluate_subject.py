"""What `toolrl eval` evaluates: a run's trained model, the one it started from, or any model under given settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolrl import presets
from toolrl.app.evaluate import evaluation, subject
from toolrl.app.run_folder import RunFolder
from toolrl.config import RunConfig
from toolrl.errors import UserError
from toolrl.tasks import Task
from toolrl.trajectory import Outcome, Trajectory, Turn


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(
        presets.load("quickstart-cpu", [f"runs_dir={tmp_path}", "name=mine", "tasks.held_out_tasks=6"])
    )


def test_a_run_is_evaluated_with_its_trained_model_once_it_has_one(run: RunFolder, tmp_path: Path) -> None:
    assert subject("mine", [], runs_dir=str(tmp_path)).model_dir == run.model
    run.final.mkdir()
    (run.final / "config.json").write_text("{}")
    chosen = subject("mine", ["rollout.max_turns=3"], runs_dir=str(tmp_path))
    assert chosen.model_dir == run.final
    assert chosen.config.rollout.max_turns == 3
    assert chosen.config.tasks.held_out_tasks == 6
    assert chosen.report_dir == run.path / "evaluation"


def test_a_model_without_a_run_is_evaluated_under_given_settings(tmp_path: Path) -> None:
    chosen = subject("tiny:qwen3", [], settings="quickstart-cpu", runs_dir=str(tmp_path))
    assert (chosen.model_dir / "model.safetensors").is_file()
    again = subject("tiny:qwen3", [], settings="quickstart-cpu", runs_dir=str(tmp_path))
    assert again.report_dir != chosen.report_dir  # a second evaluation leaves the first one's report alone


def test_what_is_no_run_is_refused_with_the_way_to_evaluate_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run 'mine'.*--settings"):
        subject("mine", [], runs_dir=str(tmp_path))


async def test_every_held_out_task_is_played_and_counted(run: RunFolder) -> None:
    config = presets.load(str(run.path / "config.yaml"))

    async def play(held_out: list[Task], samples: int, temperature: float) -> list[Trajectory]:
        return [answered(task, sample, 1.0 if sample else 0.0) for task in held_out for sample in range(samples)]

    table, episodes = await evaluation(config, play, samples=2, temperature=1.0)
    assert len(episodes) == 12
    assert (table["all"]["tasks"], table["all"]["accuracy"]) == (6, 0.0)
    assert (table["all"]["avg@2"], table["all"]["pass@2"]) == (0.5, 1.0)
    assert sorted(table["by_family"]) == ["chain_sum", "gcd", "products"]


async def test_an_evaluation_without_tasks_says_which_setting_to_change() -> None:
    config = RunConfig(tasks=presets.load("quickstart-cpu", ["tasks.held_out_tasks=0"]).tasks)

    async def play(held_out: list[Task], samples: int, temperature: float) -> list[Trajectory]:
        return []

    with pytest.raises(UserError, match=r"tasks\.held_out_tasks"):
        await evaluation(config, play, samples=1, temperature=1.0)


def answered(task: Task, sample: int, score: float) -> Trajectory:
    return Trajectory(
        id=f"{task.id}.{sample}",
        group_id=task.id,
        task_id=task.id,
        sample_index=sample,
        prompt_ids=[1],
        turns=[Turn("policy", [1], [0.0], [0], "stop", text="\\boxed{1}<|im_end|>")],
        outcome=Outcome.ANSWERED,
        rewards={"outcome": score},
        metadata={"family": task.family},
    )
