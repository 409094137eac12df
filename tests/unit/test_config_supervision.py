"""Supervision that cannot work is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolrl import presets
from toolrl.config import RunConfig
from toolrl.config_supervision import SupervisionConfig
from toolrl.errors import ConfigError

SIZED = ["loop.group_size=4", "learner.updates_per_batch=4", "buffer.drop_uniform_groups=false"]


def load(*overrides: str) -> tuple[RunConfig, list[tuple[str, str]]]:
    config, warnings = presets.load_with_warnings("quickstart-cpu", [*SIZED, *overrides])
    return config, [(problem.key, problem.message) for problem in warnings]


@pytest.mark.parametrize(
    ("overrides", "key", "told"),
    [
        (["off_policy.per_group=4"], "off_policy.per_group", "at most 3 together"),
        (["off_policy.per_group=1", "hint.per_group=3"], "hint.per_group", "leaves no sample of the policy's own"),
        (["references.path=nowhere.parquet"], "references.path", "no such file"),
        (
            ["interleaved.every_steps=2", "references={cold_start: false, own: false}"],
            "references.path",
            "no reference",
        ),
        (["hint.per_group=1", "hint.text=' '"], "hint.text", "is empty"),
        (["hint.text='It is {result}.'"], "hint.text", "only {answer} does"),
        (["interleaved.learning_rate=0"], "interleaved.learning_rate", "above 0"),
        (["erroneous.max_references=0"], "erroneous.max_references", "at least 1"),
    ],
)
def test_what_cannot_work_is_refused_and_told(overrides: list[str], key: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*(f"supervision.{each}" for each in overrides))
    (problem,) = caught.value.problems
    assert problem.key == f"supervision.{key}" and told in problem.message


def test_failed_tasks_must_reach_the_learner_where_it_is_to_learn_from_them() -> None:
    with pytest.raises(ConfigError, match="those that supervision"):
        load("supervision.erroneous.enabled=true", "buffer.drop_uniform_groups=true")


def test_tasks_are_solved_only_where_programs_run() -> None:
    with pytest.raises(ConfigError, match="the tool python runs"):
        load("supervision.references.solved_tasks=8", "tools=[calculator]")


def test_tasks_that_never_come_again_need_references_from_elsewhere(tmp_path: Path) -> None:
    asked = ["supervision.off_policy.per_group=1", "supervision.references.cold_start=false"]
    assert [key for key, _ in load(*asked)[1]] == ["supervision.references.solved_tasks"]
    (tmp_path / "traces.parquet").touch()
    for source in ("solved_tasks=100", f"path={tmp_path}/traces.parquet", "cold_start=true"):
        assert load(*asked, f"supervision.references.{source}")[1] == []
    assert load("supervision.interleaved.every_steps=2", *asked[1:])[1] == [], "any task's reference will do"


def test_supervised_steps_that_never_come_are_told() -> None:
    never = ["supervision.interleaved.every_steps=9", "loop.steps=8"]
    assert [key for key, _ in load(*never)[1]] == ["supervision.interleaved.every_steps"]
    assert load(never[0], "loop.steps=9")[1] == []


def test_all_signals_go_together_and_none_is_on_unasked() -> None:
    config, warnings = load(
        "supervision.off_policy.per_group=1",
        "supervision.hint={per_group: 2, text: 'The answer is {answer}.'}",
        "supervision.erroneous.enabled=true",
        "supervision.interleaved.every_steps=2",
    )
    assert warnings == [] and config.supervision.hint.per_group == 2
    assert load()[0].supervision == SupervisionConfig()
