"""Runs that go wrong as users see them: nothing to train on, killed in the cold start, resumed beyond its end."""

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

from toolrl.monitors.metrics_log import read_metrics

SMALL = [
    "cold_start.traces=64",
    "tasks.held_out_tasks=0",
    "loop.steps=1",
    "loop.groups_per_step=2",
    "loop.group_size=4",
    "learner.updates_per_batch=2",
    "rollout.max_turn_tokens=24",
]


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


@pytest.mark.timeout(360)
def test_a_run_whose_groups_teach_nothing_ends_by_its_deadline_with_code_1_and_the_reason(tmp_path: Path) -> None:
    """An untrained model earns 0 everywhere: every group is dropped, and no batch ever comes."""
    settings = [
        *SMALL,
        "cold_start.steps=0",
        "rewards.components=[outcome]",
        "loop.batch_deadline_s=12",
        "buffer.drop_uniform_groups=true",
        "name=idle",
    ]
    process = start(tmp_path, "quickstart-cpu", *settings)
    try:
        assert process.wait(300) == 1
    finally:
        kill_session(process)
    assert "no batch for step 1 in loop.batch_deadline_s=12 s" in said(tmp_path)
    assert "groups dropped so far: uniform" in said(tmp_path)
    assert "Traceback" not in said(tmp_path)


@pytest.mark.timeout(600)
def test_a_run_killed_in_its_cold_start_resumes_from_the_start_and_one_at_its_end_trains_nothing_again(
    tmp_path: Path,
) -> None:
    settings = [*SMALL, "cold_start.steps=200", "buffer.drop_uniform_groups=false", "name=early"]
    process = start(tmp_path, "quickstart-cpu", *settings)
    try:
        until = time.monotonic() + 200
        while "traces (" not in said(tmp_path):  # they are written, training on them begins
            assert process.poll() is None and time.monotonic() < until, said(tmp_path)[-2000:]
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    finally:
        kill_session(process)
    run = tmp_path / "my runs" / "early"
    assert list((run / "checkpoints").iterdir()) == []

    for attempt in range(2):  # resumed; and resumed again when it has reached loop.steps
        resumed = start(tmp_path, "early", "--resume", "cold_start.steps=10")
        try:
            assert resumed.wait(300) == 0, said(tmp_path)[-3000:]
        finally:
            kill_session(resumed)
        assert [row["step"] for row in read_metrics(run)] == [1], attempt
        assert json.loads((run / "checkpoints" / "step-1" / "state.json").read_text()) == {"step": 1, "version": 2}
    assert "no checkpoint yet: from the start" in said(tmp_path)
    assert "resumed after step 1" in said(tmp_path)
    assert (run / "final" / "config.json").is_file()
