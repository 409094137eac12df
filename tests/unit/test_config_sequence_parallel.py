"""Ranks that cannot share rows are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolrl.config import CriticConfig, LearnerConfig, ModelConfig, RunConfig
from toolrl.config_checks import problems
from toolrl.config_sequence_parallel import heads_problem

KEY = "learner.sequence_parallel"


def told(ranks: int, size: int, model: Path | None = None, critic: Path | None = None) -> list[str]:
    config = RunConfig(learner=LearnerConfig(ranks=ranks, sequence_parallel=size))
    config.model = ModelConfig(path=str(model)) if model else config.model
    config.critic = CriticConfig(kind="own", model=str(critic)) if critic else config.critic
    return [problem.message for problem in problems(config) if problem.key == KEY and not problem.warning]


def folder(path: Path, **config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_ranks_of_a_row_divide_the_ranks() -> None:
    assert not told(4, 1) and not told(4, 2) and not told(4, 4)
    assert told(4, 3) == ["ranks that share a row must divide learner.ranks=4; set ranks to a multiple of 3"]
    assert told(1, 2) and told(2, 0)


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "size", "fits"),
    [(8, 8, 4, True), (8, 2, 4, True), (8, 1, 8, True), (12, 4, 6, False), (12, 4, 8, False), (14, 2, 7, False)],
)
def test_ranks_of_a_row_share_out_the_heads(heads: int, key_value_heads: int, size: int, fits: bool) -> None:
    assert (heads_problem(heads, key_value_heads, size) is None) == fits


def test_the_heads_of_a_model_folder_are_read(tmp_path: Path) -> None:
    even = folder(tmp_path / "even", num_attention_heads=4, num_key_value_heads=2)
    odd = folder(tmp_path / "odd", text_config={"num_attention_heads": 9})
    assert not told(2, 2, even)
    assert told(2, 2, odd) == [f"must divide the model's 9 attention heads; one of 1, 3, 9 ({odd})"]
    assert told(2, 2, even, critic=odd) and not told(2, 1, odd)


def test_updates_are_fed_by_rows_not_by_ranks() -> None:
    config = RunConfig(learner=LearnerConfig(ranks=4, sequence_parallel=4, updates_per_batch=4))
    config.loop.groups_per_step, config.loop.group_size = 1, 4
    assert not [problem for problem in problems(config) if problem.key == "learner.updates_per_batch"]
    config.learner.sequence_parallel = 2
    assert [problem for problem in problems(config) if problem.key == "learner.updates_per_batch"]
