"""Parquet keeps everything, and its derived columns say what the trajectory says."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trajectory_strategies import trajectories
from toolrl import trajectory_parquet
from toolrl.trajectory import Outcome, ToolCall, Trajectory, Turn

in_one_folder = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@in_one_folder
@given(st.lists(trajectories(), max_size=3))
def test_export_and_import_give_back_the_same(tmp_path: Path, originals: list[Trajectory]) -> None:
    path = tmp_path / "t.parquet"
    assert trajectory_parquet.write(path, originals) == len(originals)
    assert list(trajectory_parquet.read(path)) == originals


def example(index: int) -> Trajectory:
    calls = [ToolCall("0", "python", {"code": "1", "big": 10**40})]
    turns = [
        Turn("policy", [1, 2], [-0.1, -0.2], [4, 5], calls=calls),
        Turn("tool", [3]),
        Turn("policy", [4], [-1.0], [6]),
    ]
    return Trajectory(f"t{index}", "g", "task", index, [9], turns, Outcome.ANSWERED, rewards={"outcome": 0.5})


def test_derived_columns_can_be_filtered_without_unpacking(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    trajectory_parquet.write(path, [example(0)])
    (row,) = pq.read_table(
        path, columns=["reward", "n_calls", "n_policy_turns", "policy_tokens", "oldest_version"]
    ).to_pylist()
    assert row == {"reward": 0.5, "n_calls": 1, "n_policy_turns": 2, "policy_tokens": 3, "oldest_version": 4}


def test_more_than_a_row_group_streams_in_order(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    count = trajectory_parquet.ROWS_PER_GROUP + 10
    trajectory_parquet.write(path, (example(i) for i in range(count)))
    assert pq.ParquetFile(path).num_row_groups == 2
    assert [t.sample_index for t in trajectory_parquet.read(path)] == list(range(count))


def test_another_table_is_refused_with_the_missing_columns(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"id": ["a"], "prompt": ["b"]}), path)
    with pytest.raises(ValueError, match=r"other\.parquet holds no trajectories: the columns answer, group_id"):
        list(trajectory_parquet.read(path))


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    broken = example(0)
    broken.answer = "\ud800"
    with pytest.raises(ValueError, match="t0 to t0 holds text that is not Unicode"):
        trajectory_parquet.write(tmp_path / "t.parquet", [broken])
