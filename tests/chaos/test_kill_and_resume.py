"""SIGKILL of the driver in mid-run, then `--resume`, SIGTERM and `--resume` again: nothing lost, nothing twice, nothing left
behind."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.requirements import need

need("ray", "vllm", "deepspeed")

from actors.replay import read_ledger
from toolrl.monitors.metrics_log import read_metrics

STEPS = 8
SETTINGS = [
    "name=killed",
    "cold_start.steps=30",
    "cold_start.traces=128",
    "tasks.held_out_tasks=0",
    f"loop.steps={STEPS}",
    "loop.groups_per_step=2",
    "loop.group_size=4",
    "loop.checkpoint_every_steps=2",
    "learner.updates_per_batch=2",
    "buffer.drop_uniform_groups=false",
]


def start(runs: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """`toolrl --quiet train …` in a session of its own, its output in a file beside the run."""
    command = [sys.executable, "-m", "toolrl.app.cli", "--quiet", "train", *arguments, "--runs-dir", str(runs)]
    return subprocess.Popen(command, stdout=(runs / "log").open("ab"), stderr=subprocess.STDOUT, start_new_session=True)


def said(runs: Path) -> str:
    return (runs / "log").read_text(errors="replace")[-3000:]


def wait_for_step(process: subprocess.Popen[bytes], runs: Path, step: int, deadline_s: float) -> None:
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        assert process.poll() is None, said(runs)
        rows = read_metrics(runs / "killed") if (runs / "killed" / "metrics.jsonl").exists() else []
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached: {said(runs)}")


def trained_groups(runs: Path) -> dict[int, int]:
    """{task index: the step that trained it}."""
    with sqlite3.connect(f"file:{runs / 'killed' / 'ledger.sqlite'}?mode=ro", uri=True) as db:
        return dict(db.execute("SELECT task, trained_step FROM groups WHERE state = 'trained'").fetchall())


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Every process of the run but Ray's two agents, which end by themselves a minute after their raylet."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if child.name() not in ("ray::RuntimeEnvAgent", "ray::DashboardAgent")]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, int], list[psutil.Process]]:
    """(folder of runs, what was trained when, processes that outlived the driver): a run killed one step after a checkpoint."""
    runs = tmp_path_factory.mktemp("runs with spaces")
    process = start(runs, "quickstart-cpu", *SETTINGS)
    try:
        wait_for_step(process, runs, 3, 240)
        children = descendants(process)
        before = trained_groups(runs)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        gone, alive = psutil.wait_procs(children, timeout=20)
        assert len(gone) > 3
        return runs, before, alive
    finally:
        kill_session(process)


@pytest.fixture(scope="module")
def told(killed: tuple[Path, dict[int, int], list[psutil.Process]]) -> tuple[Path, int, int, list[psutil.Process]]:
    """(folder, steps trained, exit code, processes that outlived the driver): resumed, then told to end by SIGTERM."""
    runs, _, _ = killed
    process = start(runs, "killed", "--resume")
    try:
        wait_for_step(process, runs, 4, 240)
        children = descendants(process)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        _, alive = psutil.wait_procs(children, timeout=20)
        return runs, len(read_metrics(runs / "killed")), code, alive
    finally:
        kill_session(process)


@pytest.fixture(scope="module")
def resumed(told: tuple[Path, int, int, list[psutil.Process]]) -> Path:
    """The same folder after another `--resume` went to the end."""
    runs = told[0]
    process = start(runs, "killed", "--resume")
    try:
        assert process.wait(240) == 0, said(runs)
    finally:
        kill_session(process)
    return runs


@pytest.mark.timeout(300)
def test_a_killed_driver_leaves_no_process_behind(killed: tuple[Path, dict[int, int], list[psutil.Process]]) -> None:
    _, _, alive = killed
    assert not alive, [(p.pid, p.name()) for p in alive]


@pytest.mark.timeout(300)
def test_a_run_that_is_told_to_end_keeps_every_step_and_says_how_to_go_on(
    told: tuple[Path, int, int, list[psutil.Process]],
) -> None:
    runs, steps, code, alive = told
    assert code == 0, said(runs)
    assert not alive, [(p.pid, p.name()) for p in alive]
    assert steps < STEPS
    latest = max(int(path.parent.name.removeprefix("step-")) for path in runs.glob("killed/checkpoints/*/state.json"))
    assert latest == steps  # of the step that it was at, whatever loop.checkpoint_every_steps says
    assert "`toolrl train killed --resume` goes on from there" in said(runs)


@pytest.mark.timeout(300)
def test_a_resumed_run_trains_every_task_once(
    killed: tuple[Path, dict[int, int], list[psutil.Process]], resumed: Path
) -> None:
    _, before, _ = killed
    after = trained_groups(resumed)
    assert sorted(after) == list(range(STEPS * 2))  # the next task ids follow on: none twice, none skipped
    assert sorted(after.values()) == [step for step in range(1, STEPS + 1) for _ in range(2)]
    assert {task: step for task, step in before.items() if step <= 2} == {t: s for t, s in after.items() if s <= 2}
    ledger = read_ledger(resumed / "killed" / "ledger.sqlite")
    assert ledger.balances
    assert ledger.trained == STEPS * 2 * 4
    assert [row["step"] for row in read_metrics(resumed / "killed")] == list(range(1, STEPS + 1))


@pytest.mark.timeout(300)
def test_the_trained_model_is_evaluated_by_an_engine(resumed: Path) -> None:
    command = [sys.executable, "-m", "toolrl.app.cli", "eval", str(resumed / "killed"), "tasks.held_out_tasks=6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=resumed)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    table = json.loads((resumed / "killed" / "evaluation" / "table.json").read_text())
    assert table["all"]["tasks"] == 6
    assert table["all"]["missing"] == 0
    assert set(table["by_family"]) <= {"chain_sum", "gcd", "products"}


def kill_session(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
