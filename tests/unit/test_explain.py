"""`toolrl explain`: a run's guards in plain sentences, in order; and what came near where nothing happened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from toolrl import presets
from toolrl.app.cli import main
from toolrl.app.explain import explain, near_text, summary
from toolrl.app.run_folder import RunFolder
from toolrl.config import Named, RunConfig
from toolrl.guards import Guards, Journal, Rule
from toolrl.guards.presets import rules
from toolrl.guards.replay import replay
from toolrl.monitors.metrics_log import MetricsLog

RULE = (
    "{name: calls_low, metric: tool/call_rate, condition: below, threshold: 0.3, follow_up_steps: 2, action: lower_lr}"
)


def a_run(folder: Path, values: Sequence[float], *settings: str, metric: str = "tool/call_rate") -> Path:
    """A run's folder after so many steps under its guards, with what the loop writes of an action."""
    config = presets.load("quickstart-cpu", [f"runs_dir={folder}", "name=kept", *settings])
    path = RunFolder.create(config).path
    journal = Journal(path)
    guards = Guards(rules(config), journal)
    with MetricsLog(path, tensorboard=False) as log:
        for step, value in enumerate(values, 1):
            log.write(step, step, 0.0, {metric: value})
            for each in guards.observe(step, {metric: value}):
                journal.write(step, "done", rule=each.rule, action=each.action, text="set lr_factor from 1 to 0.5")
    return path


def test_the_story_is_told_in_order(tmp_path: Path) -> None:
    path = a_run(tmp_path, [0.6, 0.2, 0.25, 0.5], f"guards.rules=[{RULE}]")
    Journal(path).write(
        9, "ended", rule="calls_low", action="lower_lr", what="action", text="let lr_factor come back to 1"
    )
    found = explain(path)
    assert [(each.step, each.kind) for each in found.told] == [
        (2, "seen"),
        (2, "done"),
        (4, "came_of_it"),
        (4, "ended"),
        (9, "ended"),
    ]
    assert [each.text for each in found.told] == [
        "tool/call_rate was 0.2, below 0.3; its last values: 0.6, 0.2",
        "lower_lr: set lr_factor from 1 to 0.5",
        "in the 2 steps since, tool/call_rate went from 0.2 to 0.5: the trouble is gone",
        "tool/call_rate is back at 0.5",
        "lower_lr: let lr_factor come back to 1",
    ]
    assert summary(found) == "The 1 rule of kept fired 1 time in 4 steps, the last at step 2."
    assert found.near == []


@pytest.mark.parametrize(
    ("condition", "values", "sentence"),
    [
        ("drop_from_peak", [0.9, 0.2], "fell to 0.2 from its peak of 0.9, below 0.6"),
        ("rise_from_low", [0.1, 0.5], "rose to 0.5 from its low of 0.1, above 0.4"),
        ("above", [0.1, 0.5], "was 0.5, above 0.3"),
    ],
)
def test_each_condition_has_its_words(tmp_path: Path, condition: str, values: list[float], sentence: str) -> None:
    rule = f"{{name: it, metric: tool/call_rate, condition: {condition}, threshold: 0.3}}"
    told = explain(a_run(tmp_path, values, f"guards.rules=[{rule}]")).told
    assert sentence in told[0].text
    assert told[1].text.startswith("tell: ")


def test_when_nothing_happened_it_says_so_and_what_came_near(tmp_path: Path) -> None:
    path = a_run(tmp_path, [0.9, 0.35, 0.8], f"guards.rules=[{RULE}]")
    found = explain(path)
    assert summary(found) == "Nothing happened: none of the 1 rule of kept fired in 3 steps."
    (near,) = found.near
    assert (near.rule.name, near.step, near.level, near.limit) == ("calls_low", 2, 0.35, 0.3)
    assert near_text(near) == "86% of the way"


def test_a_rule_whose_metric_is_never_there_is_named(tmp_path: Path) -> None:
    found = explain(a_run(tmp_path, [1.0], f"guards.rules=[{RULE}]", metric="solve_rate"))
    assert [each.rule.name for each in found.blind] == ["calls_low"]


def test_a_run_without_guards_is_told_what_they_would_have_seen(tmp_path: Path) -> None:
    path = a_run(tmp_path, [0.9] * 5 + [0.1] * 5)
    found = explain(path)
    assert summary(found) == "The guards of watch would have fired 1 time in 10 steps of kept; they were not in force."
    assert [(each.step, each.kind, each.rule) for each in found.told] == [(6, "would", "calls_fade")]
    assert not (path / "guards.jsonl").read_text()
    assert summary(explain(path, "strict")).startswith("The guards of strict would have fired")


def test_the_command_prints_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    path = a_run(tmp_path, [0.6, 0.2], f"guards.rules=[{RULE}]")
    with pytest.raises(SystemExit, match="0"):
        main(["explain", "kept", "--runs-dir", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "The 1 rule of kept fired 1 time in 2 steps" in shown
    assert "lower_lr: set lr_factor from 1 to 0.5" in shown
    with pytest.raises(SystemExit, match="0"):
        main(["explain", str(path), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [each["kind"] for each in told["told"]] == ["seen", "done"]
    assert (told["run"], told["steps"], told["rules"]) == ("kept", 2, ["calls_low"])


def rule(condition: str, threshold: float, hold: int = 1) -> Rule:
    named = {"name": "it", "metric": "m", "action": Named("tell")}
    return Rule(condition=condition, threshold=threshold, hold=hold, floor=0.0, **named)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("watched", "values", "share"),
    [
        (rule("above", 0.05), [0.01, 0.04], 0.8),
        (rule("above", -0.1), [-0.4, -0.2], 0.5),
        (rule("below", 0.2), [0.9, 0.25], 0.8),
        (rule("below", -0.02), [0.01, -0.015], 0.75),
        (rule("below", -0.02), [0.01, 0.02], 0.0),
        (rule("drop_from_peak", 0.4), [0.3, 0.9, 0.6], 0.75),
        (rule("rise_from_low", 0.4), [0.3, 0.1, 0.4], 0.75),
        (rule("above_ema", 4.0), [1.0, 3.0], 0.75),
        (rule("above", 0.0), [0.0, 0.0], 0.0),
    ],
)
def test_how_near_a_rule_came(watched: Rule, values: list[float], share: float) -> None:
    fired, (closest,) = replay([watched], [{"step": step, "m": value} for step, value in enumerate(values, 1)])
    assert fired == []
    assert closest.share == pytest.approx(share)


def test_a_limit_passed_for_too_short_is_near() -> None:
    rows = [{"step": step, "m": value} for step, value in enumerate([0.1, 0.9, 0.9, 0.1], 1)]
    fired, (closest,) = replay([rule("above", 0.5, hold=3)], rows)
    assert (fired, closest.is_near) == ([], True)
    assert near_text(closest) == "beyond it for 2 of the 3 steps in a row that it takes"


def test_what_is_replayed_is_what_the_guards_decided() -> None:
    config: RunConfig = presets.load("quickstart-cpu", ["guards.preset=standard"])
    values = [0.9, 0.9, 0.9, 0.5, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0, 0.9, 0.9, 0.9, 0.0, 0.0, 0.0]
    rows = [{"step": step, "tool/call_rate": value} for step, value in enumerate(values, 1)]
    guards = Guards(rules(config))
    assert replay(rules(config), rows)[0] == [each for row in rows for each in guards.observe(int(row["step"]), row)]
