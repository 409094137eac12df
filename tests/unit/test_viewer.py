"""What people see of a run, and the files that a view leaves behind."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from toolrl import presets, trajectory_parquet
from toolrl.app.run_folder import RunFolder
from toolrl.app.viewer import plot_curves
from toolrl.app.viewer.ledger_table import ledger_table
from toolrl.app.viewer.screen import Seen, screen, sparkline
from toolrl.app.viewer.step_line import duration, number, queue_depths, step_line
from toolrl.app.viewer.summary import summary
from toolrl.app.viewer.trajectory_text import trajectory_text
from toolrl.app.viewer.view import View, chosen
from toolrl.ledger import Ledger
from toolrl.monitors.metrics_log import read_metrics
from toolrl.trajectory import CallError, Outcome, ToolCall, ToolResult, Trajectory, Turn

METRICS = {
    "reward/mean": 0.25,
    "reward/std": 0.4,
    "tool/call_rate": 0.5,
    "tool/calls_per_trajectory": 1.1,
    "format/healthy": 0.9,
    "staleness/mean": 0.5,
    "tokens/policy": 3000.0,
    "loss/policy": -0.01,
    "ratio/max": 1.2,
    "ratio/clip_fraction": 0.02,
    "entropy/mean": 0.6,
    "grad/norm": 0.4,
    "time/rollout_s": 2.0,
    "time/learn_s": 1.0,
    "time/publish_s": 0.0,
    "buffer/groups_ready": 3.0,
    "buffer/groups_generating": 13.0,
}


def trajectory(sample: int = 0, reward: float = 1.0) -> Trajectory:
    return Trajectory(
        id=f"g7-{sample}",
        group_id="g7",
        task_id="chain_sum-7",
        sample_index=sample,
        prompt_ids=[1, 2, 3],
        turns=[
            Turn(
                "policy",
                [4, 5],
                [-0.1, -0.5],
                [3, 3],
                "stop",
                text='<tool_call>[bold]{"name": "python"}</tool_call>',
                calls=[ToolCall("c1", "python", {"code": "print(31+54)"})],
                call_errors=[CallError("bad_json", "expected a comma")],
                rewards={"format": -0.1},
            ),
            Turn("tool", [6, 7], results=[ToolResult("c1", "python", "timeout", "stopped", True, 0.5, 0.25)]),
            Turn("policy", [8], [-0.05], [4], "length", text="\\boxed{85}"),
        ],
        outcome=Outcome.ANSWERED,
        answer="85",
        rewards={"outcome": reward},
        metadata={"family": "chain_sum", "ground_truth": "85"},
    )


def evaluation(accuracy: float) -> dict[str, Any]:
    measured = {"tasks": 64, "accuracy": accuracy, "reward": accuracy, "tool_call_rate": accuracy}
    return {"all": measured, "by_family": {"gcd": measured, "chain_sum": measured}}


def text_of(renderable: Any, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    return RunFolder.create(presets.load("quickstart-cpu", ["name=seen", "loop.steps=4"]))


def run_view(folder: RunFolder, steps: range, finish: bool = False) -> None:
    config = presets.load(str(folder.path / "config.yaml"))
    with View(config, folder) as view:
        view.stage("starting")
        if steps[0] == 1:
            view.evaluated(0, evaluation(0.25))
        for step in steps:
            metrics = METRICS | {"reward/mean": step / 10}
            view.step(step, step, metrics, [trajectory(i, reward=i / 8) for i in range(9)])
        view.evaluated(steps[-1], evaluation(0.75))
        if finish:
            view.finish([], Ledger(10, 8, 0, 0, 1, 0, 0, {"uniform": 1}))


def test_in_a_pipe_a_run_prints_one_line_a_step_and_a_last_screen(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run_view(folder, range(1, 5), finish=True)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    steps = [line for line in printed.splitlines() if "  step " in line]
    assert len(steps) == 4
    assert "step 2/4  reward 0.200±0.40  calls 0.50 (1.10 each)" in steps[1]
    assert "staleness 0.50" in steps[1] and "tok/s" in steps[1] and "groups 13 generating, 3 ready" in steps[1]
    assert "64 held-out tasks" in printed and "+0.500" in printed  # 0.25 -> 0.75
    assert "runs/seen/curves.png" in printed
    assert "toolrl show seen --step 4" in printed
    assert "the ledger balances" in printed


def test_a_view_leaves_metrics_trajectories_evaluations_and_curves(folder: RunFolder) -> None:
    run_view(folder, range(1, 5), finish=True)
    rows = read_metrics(folder.path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["speed/policy_tokens_per_s"] == pytest.approx(1000.0)  # 3000 tokens in a first step of 2 + 1 + 0 s
    stored = list(trajectory_parquet.read(folder.trajectories_of(4)))
    assert [t.reward for t in stored] == sorted((t.reward for t in stored), reverse=True)
    assert len(stored) == 4
    kept = [json.loads(line) for line in (folder.path / "evaluations.jsonl").read_text().splitlines()]
    assert [(each["step"], each["all"]["accuracy"]) for each in kept] == [(0, 0.25), (4, 0.75)]
    png = (folder.path / "curves.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 10_000


def test_a_resumed_view_goes_on_in_time_and_compares_with_the_first_start(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run_view(folder, range(1, 3))
    before = read_metrics(folder.path)[-1]["time_s"]
    run_view(folder, range(3, 5), finish=True)
    rows = read_metrics(folder.path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[2]["time_s"] > before
    assert "│  0.250 │ 0.750 │ +0.500 │" in capsys.readouterr().out  # accuracy before the first start, and now


def test_text_that_parquet_cannot_hold_costs_those_trajectories_and_not_the_run(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = trajectory()
    bad.turns[0].text = "\ud800"
    config = presets.load(str(folder.path / "config.yaml"))
    with View(config, folder) as view:
        view.step(1, 1, METRICS, [bad])
    assert "step-1.parquet not written" in capsys.readouterr().out
    assert not list(folder.trajectories.iterdir())


def test_stored_samples_reach_from_the_best_to_the_worst() -> None:
    some = [trajectory(i, reward=i / 10) for i in range(11)]
    assert [t.rewards["outcome"] for t in chosen(some, 3)] == [1.0, 0.5, 0.0]
    assert [t.rewards["outcome"] for t in chosen(some, 1)] == [1.0]
    assert chosen(some, 0) == [] and len(chosen(some, 50)) == 11


def test_a_trajectory_is_shown_turn_by_turn_with_all_that_was_recorded() -> None:
    shown = text_of(trajectory_text(trajectory(), learner_version=5, decode=lambda ids: f"prompt of {len(ids)}"))
    for part in (
        "chain_sum-7 (chain_sum)",
        "weights v3–4, staleness 2",
        "prompt of 3",
        "policy, turn 1, 2 tokens, mean log-probability -0.300, format -0.1",
        '[bold]{"name": "python"}',  # a policy's text is never read as markup
        "bad_json: expected a comma",
        "python → timeout, 500 ms + 250 ms waiting, truncated",
        "policy, turn 2, 1 tokens, mean log-probability -0.050, ended by length",
        "outcome answered",
        "answer '85' (right: '85')",
        "reward +0.900 (outcome +1, turns -0.1)",
    ):
        assert part in shown, part


def test_a_trajectory_is_coloured_by_kind() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=120)
    console.print(trajectory_text(trajectory()))
    coloured = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[33m╭─" in coloured  # a failed tool turn: yellow
    assert "\x1b[36m╭─" in coloured  # a healthy policy turn: cyan
    assert "\x1b[31m╭─" in coloured  # a policy turn with a broken call: red


def test_the_live_screen_holds_what_is_asked_for_and_keeps_its_height() -> None:
    seen = Seen("seen", steps=10)
    heights = []
    for step in range(1, 11):
        seen.add(step, METRICS | {"reward/mean": step / 10}, left_s=60.0)
        seen.stage = "publishing"
        heights.append(text_of(screen(seen)).count("\n"))
    shown = text_of(screen(seen))
    for part in (
        "step 10/10",
        "about 1:00 left",
        "reward",
        "1.000",
        "call rate",
        "staleness",
        "tokens/s",
        "13 generating",
    ):
        assert part in shown, part
    assert len(set(heights)) == 1


@pytest.mark.parametrize(
    ("values", "shown"),
    [([], ""), ([1.0], "▁"), ([0, 1], "▁█"), ([math.nan, 0, 7, math.inf], "▁█"), ([5, 5, 5], "▁▁▁")],
)
def test_a_sparkline_rises_with_its_values(values: list[float], shown: str) -> None:
    assert sparkline(values) == shown


def test_a_long_history_is_averaged_into_the_width() -> None:
    line = sparkline([float(i) for i in range(1000)], width=16)
    assert len(line) == 16 and line[0] == "▁" and line[-1] == "█"


def test_groups_that_wait_for_rewards_are_told_where_there_are_some() -> None:
    assert queue_depths(METRICS | {"buffer/groups_unrewarded": 0.0}) == queue_depths(METRICS)
    assert queue_depths(METRICS | {"buffer/groups_unrewarded": 4.0}) == "13 generating, 3 ready, 4 unrewarded"


def test_missing_and_infinite_numbers_are_a_dash() -> None:
    assert number({"a": math.nan}, "a") == number({}, "a") == number({"a": math.inf}, "a") == "–"
    assert "reward –±–" in step_line(1, 2, {}, 5.0)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0 s"), (59.6, "1:00"), (185, "3:05"), (3723, "1:02:03"), (-4, "0 s")]
)
def test_durations_are_short(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_the_last_screen_fits_one_screen(folder: RunFolder) -> None:
    run_view(folder, range(1, 5))
    shown = text_of(summary(Path("runs/seen"), [evaluation(0.25), evaluation(0.75)]), width=100)
    assert shown.count("\n") <= 32
    assert "accuracy, gcd" in shown


def test_a_run_elsewhere_is_named_by_its_folder_in_the_next_commands(folder: RunFolder) -> None:
    run_view(folder, range(1, 3))
    assert f"toolrl show {folder.path} --step 2" in text_of(summary(folder.path, []), width=400)


def test_the_curves_wait_for_a_first_step(tmp_path: Path) -> None:
    assert plot_curves(tmp_path) is None


def test_a_ledger_that_does_not_balance_is_said_to_be_damaged() -> None:
    good = Ledger(issued=10, trained=5, ready=1, leased=1, waiting=1, running=1, arrived=0, dropped={"uniform": 1})
    assert "balances: 10 issued = 10" in text_of(ledger_table(good))
    bad = Ledger(issued=11, trained=5, ready=1, leased=1, waiting=1, running=1, arrived=0, dropped={"uniform": 1})
    assert "DOES NOT BALANCE: 11 issued ≠ 10" in text_of(ledger_table(bad))
