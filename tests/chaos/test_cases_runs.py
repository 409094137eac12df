"""A run that goes wrong as users see it, start after start: killed in its cold start, nothing to train on, resumed and
trained, resumed at its end. What each start finds is what the one before left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.test_kill_and_resume import kill_session
from tests.requirements import need

need("ray", "vllm", "deepspeed")

from actors.replay import read_ledger
from toolrl.monitors.metrics_log import read_metrics

SETTINGS = [
    "name=early",
    "cold_start.traces=64",
    "tasks.held_out_tasks=0",
    "loop.steps=1",
    "loop.groups_per_step=2",
    "loop.group_size=4",
    "learner.updates_per_batch=2",
    "rollout.max_turn_tokens=24",
    "buffer.drop_uniform_groups=false",
]
# An untrained model earns 0 everywhere: every group is dropped, and no batch ever comes.
TEACHES_NOTHING = [
    "cold_start.steps=0",
    "rewards.components=[outcome]",
    "buffer.drop_uniform_groups=true",
    "buffer.max_refills=1",
]
TRAINS = ["cold_start.steps=10", "rewards.components=[outcome, format]", "buffer.drop_uniform_groups=false"]


def start(place: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "toolrl.app.cli",
        "--quiet",
        "train",
        *arguments,
        "--runs-dir",
        str(place / "my runs"),
    ]
    return subprocess.Popen(
        command, stdout=(place / "log").open("ab"), stderr=subprocess.STDOUT, start_new_session=True
    )


def said(place: Path) -> str:
    return (place / "log").read_text(errors="replace")


def resumed(place: Path, *settings: str) -> tuple[int, str]:
    """(exit code, what it said) of `toolrl train early --resume …`."""
    before = len(said(place))
    process = start(place, "early", "--resume", *settings)
    try:
        code = process.wait(300)
    finally:
        kill_session(process)
    return code, said(place)[before:]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run lies, killed when training on its cold start's traces began."""
    place = tmp_path_factory.mktemp("runs")
    process = start(place, "quickstart-cpu", *SETTINGS, "cold_start.steps=200")
    try:
        until = time.monotonic() + 200
        while "traces (" not in said(place):  # they are written, training on them begins
            assert process.poll() is None and time.monotonic() < until, said(place)[-2000:]
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    finally:
        kill_session(process)
    assert list((place / "my runs" / "early" / "checkpoints").iterdir()) == []
    return place


@pytest.mark.timeout(420)
def test_a_run_whose_groups_teach_nothing_ends_by_its_bound_with_code_1_and_the_reason(place: Path) -> None:
    """The other bound, `loop.batch_deadline_s`: integration/test_loop.py."""
    code, text = resumed(place, *TEACHES_NOTHING)
    assert code == 1, text[-3000:]
    assert "no checkpoint yet: from the start" in text
    assert "groups in a row had rewards without spread (buffer.max_refills=1 batches of 2)" in text
    assert "Traceback" not in text


@pytest.mark.timeout(420)
def test_a_run_killed_in_its_cold_start_resumes_from_the_start(place: Path) -> None:
    code, text = resumed(place, *TRAINS)
    assert code == 0, text[-3000:]
    assert "no checkpoint yet: from the start" in text
    check_trained_once(place)


@pytest.mark.timeout(420)
def test_a_run_at_its_end_trains_nothing_again_and_starts_nothing(place: Path) -> None:
    started = time.monotonic()
    code, text = resumed(place)
    assert code == 0 and "nothing left to train: 1 steps are done" in text, text[-3000:]
    assert "starting Ray" not in text and time.monotonic() - started < 60
    check_trained_once(place)


def check_trained_once(place: Path) -> None:
    run = place / "my runs" / "early"
    assert [row["step"] for row in read_metrics(run)] == [1]
    state = json.loads((run / "checkpoints" / "step-1" / "state.json").read_text())
    assert (state["step"], state["version"]) == (1, 2)
    ledger = read_ledger(run / "ledger.sqlite")
    assert ledger.balances and ledger.trained == 8
    assert (run / "final" / "config.json").is_file()
