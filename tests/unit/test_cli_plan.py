"""`toolrl plan`, and the rates that it reads off a run."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from toolrl import presets, trajectory_parquet
from toolrl.app.cli import main
from toolrl.app.run_folder import RunFolder
from toolrl.app.run_rates import run_rates
from toolrl.errors import UserError
from toolrl.planning import Layout, simulate
from toolrl.trajectory import Outcome, ToolCall, ToolResult, Trajectory, Turn

SMALL = ["loop.groups_per_step=8", "rollout.max_turns=4"]


def test_a_plan_says_where_its_rates_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(
            [
                "plan",
                "math-4b",
                "--gpu",
                "h100",
                "--gpus",
                "8",
                "--steps",
                "1",
                "--json",
                "--rate",
                "tool.mean_s=0.1",
                *SMALL,
            ]
        )
    found = json.loads(capsys.readouterr().out)
    assert found["rates"]["source"] == "estimated from the data sheet of h100 for 4 B parameters; --rate"
    assert found["rates"]["tool.mean_s"] == 0.1
    assert found["forecast"]["staleness_max"] <= 2
    layout = found["split"]["layout"]
    assert layout["workers"] + layout["learner_ranks"] == 8 and layout["learner_ranks"] >= 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "a plan needs rates"),
        (["--gpu", "h1000"], "did you mean 'h100'"),
        (["--rate", "tool.mean_s=fast"], "must be NAME=NUMBER"),
        (["--rates", "nowhere.yaml"], "cannot be read"),
        (["--gpu", "h100", "--gpus", "2"], "hold no engine"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "math-4b", "--steps", "1", *arguments, *SMALL])
    assert said in capsys.readouterr().err.replace("\n", " ")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run that took turns: 8 requests at once, 0.02 s a token each, where one alone would take 0.01 s."""
    config = presets.load(
        "quickstart-cpu", [f"runs_dir={tmp_path}", "buffer.max_staleness=0", "loop.groups_per_step=4"]
    )
    folder = RunFolder.create(config)
    row = {
        "turns/mean": 2.0,
        "length/policy_mean": 40.0,
        "length/total_mean": 90.0,
        "tool/wall_s_mean": 0.2,
        "tool/queue_s_mean": 0.0,
        "tool/cpu_s_mean": 0.001,
        "tool/calls_per_trajectory": 1.0,
        "tokens/total": 32 * 90.0,
        "time/rollout_s": 3.2,
        "time/learn_s": 1.1,
        "time/learn_processor_s": 1.0,
        "time/publish_s": 0.1,
    }
    with (folder.path / "metrics.jsonl").open("w") as lines:
        for step in range(6):
            counters = {"worker/processor_s": step * 0.64, "worker/engine_processor_s": step * 2.4}
            counters["worker/machine_processor_s"] = 500 + step * (0.64 + 2.4 + 1.0 + 0.32)
            lines.write(json.dumps(row | counters | {"time_s": 4.4 * step}) + "\n")
    rng = random.Random(0)
    trajectory_parquet.write(folder.trajectories_of(1), [episode(index, rng) for index in range(40)])
    return folder


def episode(index: int, rng: random.Random) -> Trajectory:
    call = ToolCall("c", "python", {"code": "1"})
    result = ToolResult("c", "python", "ok", "1", wall_s=rng.choice([0.1, 0.3]))
    sampled = {"logprobs": [0.0] * 20, "weight_versions": [0] * 20}
    return Trajectory(
        id=f"g.{index}",
        group_id="g",
        task_id="t",
        sample_index=index,
        prompt_ids=[1] * 30,
        turns=[
            Turn(kind="policy", token_ids=[2] * 20, calls=[call], **sampled),
            Turn(kind="tool", token_ids=[3] * 20, results=[result]),
            Turn(kind="policy", token_ids=[2] * 20, **sampled),
        ],
        outcome=Outcome.ANSWERED,
        timings={"generate_s": 40 * (0.01 if index < 2 else 0.02)},
    )


def test_rates_of_a_run_are_what_it_met(run: RunFolder) -> None:
    rates = run_rates(run.path)
    assert rates.source == f"measured by run {run.path.name}"
    assert (rates.episode.prompt_tokens, rates.episode.turns, rates.episode.turn_tokens) == (30, 2, 20)
    assert rates.episode.observation_tokens == 20
    assert rates.learner.tokens_per_s == pytest.approx(32 * 90 / 1.0)
    assert rates.learner.step_s == pytest.approx(0.1)
    # 32 episodes × 40 tokens × 0.0195 s in 3.2 s: 7.8 at once by Little's law; then both scaled to the length of its steps.
    assert rates.engine.step_s_each / rates.engine.step_s == pytest.approx(0.0095 / 6.8 / 0.01)
    assert rates.engine.turn_s == pytest.approx(0.64 / 64)
    assert rates.machine.engine_cores == pytest.approx(0.75)
    assert rates.machine.call_core_s == pytest.approx(0.32 / 32)
    forecast = simulate(rates, Layout.of(presets.load(str(run.path / "config.yaml"))), steps=5)
    assert forecast.step_s == pytest.approx(4.4, rel=0.1)


def test_a_run_that_tells_too_little_is_refused(run: RunFolder) -> None:
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    (run.path / "metrics.jsonl").write_text("\n".join(lines[:2]))
    with pytest.raises(UserError, match="3 are needed"):
        run_rates(run.path)
    older = [{key: value for key, value in json.loads(line).items() if "processor" not in key} for line in lines]
    (run.path / "metrics.jsonl").write_text("\n".join(map(json.dumps, older)))
    with pytest.raises(UserError, match="counted no processor seconds"):
        run_rates(run.path)
