"""`toolrl monitor`: what is read again from a run's files, what is taken as written down, and that it says which."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.replay import ReplaySettings, ReplayStore, read_trained
from toolrl import presets, trajectory_parquet
from toolrl.app.cli import main
from toolrl.app.monitor import monitor_run
from toolrl.app.run_folder import RunFolder
from toolrl.errors import UserError
from toolrl.monitors.metrics_log import MetricsLog
from toolrl.trajectory import Outcome, ToolCall, Trajectory, Turn

GROUPS, SIZE = 2, 2


def played(group: str, sample: int, calls: int, right: float, version: int) -> Trajectory:
    made = [ToolCall(f"call_{index}", "python", {"code": "1"}) for index in range(calls)]
    turn = Turn("policy", [5, 6], [-1.0, -1.0], [version, version], "stop", "4", made)
    return Trajectory(
        f"{group}/{sample}",
        group,
        group,
        sample,
        [1],
        [turn],
        outcome=Outcome.ANSWERED,
        rewards={"outcome": right},
        metadata={"family": "gcd"},
    )


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Four steps of two groups of two. The buffer keeps the last two; step 2 shows two of its trajectories, step 1 none."""
    changes = [f"runs_dir={tmp_path}", "name=run", f"loop.group_size={SIZE}", f"loop.groups_per_step={GROUPS}"]
    folder = RunFolder.create(presets.load("quickstart-cpu", changes))
    settings = ReplaySettings(group_size=SIZE, batch_groups=GROUPS, keep_trained_steps=2)
    store = ReplayStore(folder.ledger, settings)
    with MetricsLog(folder.path, tensorboard=False) as log:
        for step in range(1, 5):
            members = []
            store.set_version(step - 1)
            for _ in range(GROUPS):
                ticket = store.lease_ticket("w", engine_version=step - 1)
                assert ticket is not None
                members += [
                    played(ticket.group_id, index, step if index else 0, index, step - 1) for index in range(SIZE)
                ]
                store.put("w", members[-SIZE:])
            batch = store.lease_batch("learner", GROUPS, step - 1)
            assert batch is not None
            store.ack(batch.batch_id, step, step)
            for member in members:
                member.rewards["late"] = 0.5  # as a reward of the whole group is added at the step
            written = {
                "tool/call_rate": 0.5,
                "reward/mean": 1.0,
                "control/mass_outside": step / 1000,
                "samples/trained": 4.0,
            }
            log.write(step, step, float(step), written)
            if step == 2:
                trajectory_parquet.write(folder.trajectories_of(step), members[1:3])
    store.close()
    return folder


def test_the_buffer_gives_the_batches_that_it_still_has_by_step(run: RunFolder) -> None:
    kept = list(read_trained(run.ledger))
    assert [(each.step, each.version, len(each.trajectories)) for each in kept] == [(3, 3, 4), (4, 4, 4)]
    assert all(turn.weight_versions == [2, 2] for t in kept[0].trajectories for turn in t.policy_turns)


def test_what_is_kept_is_read_again_and_the_rest_is_as_it_was_written(run: RunFolder) -> None:
    steps = monitor_run(run.path)
    assert [(step.step, step.read, step.trained) for step in steps] == [(1, 0, 4), (2, 2, 4), (3, 4, 4), (4, 4, 4)]
    first, second, third, last = steps
    assert set(first.origins.values()) == {"stored"} and "tool/calls_per_trajectory" not in first.values
    assert second.origins["tool/call_rate"] == "stored"  # a few that were picked by their reward say less
    assert second.origins["tool/calls_per_trajectory"] == "sample" and second.values["tool/calls_per_trajectory"] == 1.0
    for step, number in ((third, 3), (last, 4)):
        assert step.origins["tool/call_rate"] == step.origins["tool/calls_per_trajectory"] == "recomputed"
        assert step.values["tool/calls_per_trajectory"] == number / 2
        assert step.values["interaction/evidence"] == 1.0 and step.values["staleness/mean"] == 0.0
        assert step.values["format/healthy_answer"] == 1.0
        assert (step.origins["reward/mean"], step.values["reward/mean"]) == ("stored", 1.0)
        assert step.origins["control/mass_outside"] == "stored" and step.differing == []


def test_a_number_that_was_written_otherwise_is_told(run: RunFolder) -> None:
    lines = run.metrics.read_text().splitlines()
    changed = json.loads(lines[-1]) | {"tool/call_rate": 0.25}
    run.metrics.write_text("\n".join([*lines[:-1], json.dumps(changed)]) + "\n")
    last = monitor_run(run.path)[-1]
    assert last.differing == ["tool/call_rate"] and last.values["tool/call_rate"] == 0.5


@pytest.fixture
def toolrl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """Runs the command: (what it printed, what it said of errors)."""
    monkeypatch.setenv("COLUMNS", "140")

    def command(*arguments: str) -> tuple[str, str]:
        with pytest.raises(SystemExit):
            main(arguments)
        found = capsys.readouterr()
        return found.out, found.err

    return command


def test_the_table_says_where_each_number_is_from(run: RunFolder, toolrl: Callable[..., tuple[str, str]]) -> None:
    lines = toolrl("monitor", str(run.path), "--columns", "3")[0].splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    rows = {name: values for name, *values in cells}
    assert rows["trajectories read again"] == ["", "0 of 4", "4 of 4", "4 of 4"]
    assert rows["tool/call_rate"] == ["recomputed, stored", "0.5", "0.5", "0.5"]
    assert rows["tool/calls_per_trajectory"] == ["recomputed", "", "1.5", "2"]
    assert rows["control/mass_outside"] == ["stored", "0.001", "0.003", "0.004"]
    assert not any(value == [""] * 4 for value in rows.values())  # no row of steps that are not shown
    assert "control/" not in toolrl("monitor", str(run.path), "--only", "reward/*")[0]
    assert "did you mean 'tool/call_rate'?" in toolrl("monitor", str(run.path), "--only", "tool/cal_rate")[1]


def test_the_json_holds_every_step_and_the_origin_of_each_number(
    run: RunFolder, toolrl: Callable[..., tuple[str, str]]
) -> None:
    steps = json.loads(toolrl("monitor", str(run.path), "--json")[0])
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[3]["trajectories"] == {"read": 4, "trained": 4}
    assert steps[3]["metrics"]["tool/call_rate"] == {"value": 0.5, "from": "recomputed"}
    assert steps[0]["metrics"]["tool/call_rate"] == {"value": 0.5, "from": "stored"}


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    folder = RunFolder.create(presets.load("quickstart-cpu", [f"runs_dir={tmp_path}", "name=new"]))
    with pytest.raises(UserError, match="nothing was trained"):
        monitor_run(folder.path)
