"""metrics.jsonl and TensorBoard's events: whole lines, ascending steps, readable at any moment."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from toolrl.monitors.metrics_log import FILE, MetricsLog, read_metrics


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_what_is_written_is_read_back_with_step_version_and_time_first(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, 2, 3.5, {"reward/mean": 0.25, "a": 1})
        log.write(2, 3, 4.5, {"reward/mean": 0.5})
        assert read_metrics(tmp_path)[1] == {"step": 2, "version": 3, "time_s": 4.5, "reward/mean": 0.5}  # while open
    assert list(lines(tmp_path)[0]) == ["step", "version", "time_s", "a", "reward/mean"]


def test_numbers_that_json_does_not_know_are_null_and_read_as_nan(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, 1, 1.0, {"loss": math.nan, "ratio": math.inf})
    assert lines(tmp_path)[0]["loss"] is None
    row = read_metrics(tmp_path)[0]
    assert math.isnan(row["loss"]) and math.isnan(row["ratio"])


def test_a_resumed_run_replaces_the_steps_that_it_trains_again(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, tensorboard=False) as log:
        for step in range(1, 6):
            log.write(step, step, step, {"x": 0.0})
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(4, 4, 9.0, {"x": 1.0})
        log.write(5, 5, 10.0, {"x": 1.0})
        log.write(6, 6, 11.0, {"x": 1.0})
    assert [(row["step"], row["x"]) for row in read_metrics(tmp_path)] == [
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 1),
        (5, 1),
        (6, 1),
    ]


@pytest.mark.parametrize("tail", ['{"step": 3, "vers', '{"step": 3}', "\x00\x00\x00\n", "null ,\n"])
def test_a_line_that_a_killed_run_left_half_written_is_cut_off(tail: str, tmp_path: Path) -> None:
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, 1, 1.0, {})
        log.write(2, 2, 2.0, {})
    with (tmp_path / FILE).open("a") as file:
        file.write(tail)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(3, 3, 3.0, {})
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3]


def test_a_run_without_metrics_reads_as_empty(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_tensorboard_reads_the_same_numbers_and_forgets_repeated_steps(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(step, step, step, {"reward/mean": step / 10, "loss": math.nan})
    with MetricsLog(tmp_path) as log:
        log.write(2, 2, 4.0, {"reward/mean": 0.9})
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True).Reload()
    scalars = [(event.step, round(event.value, 3)) for event in events.Scalars("reward/mean")]
    assert scalars == [(1, 0.1), (2, 0.9)]
    assert "loss" not in events.Tags()["scalars"]
