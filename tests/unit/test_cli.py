"""The command line: a table of contents, errors in words, nothing heavy before it is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from actors.replay import ReplaySettings, ReplayStore
from toolrl import presets, trajectory_parquet
from toolrl.app import runs
from toolrl.app.cli import app, main
from toolrl.app.run_folder import RunFolder
from toolrl.config import RunConfig
from toolrl.monitors.metrics_log import MetricsLog
from toolrl.trajectory import Outcome, Trajectory, Turn

HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "matplotlib", "pandas", "reasoning_gym")


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def toolrl(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")

    def run(*arguments: str) -> Result:
        code = 0
        try:
            main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def commands() -> list[list[str]]:
    """Every command of the application, groups opened."""
    found: list[list[str]] = []

    def walk(node: object, path: list[str]) -> None:
        children = getattr(node, "commands", None)
        if children is None:
            found.append(path)
            return
        for name, child in children.items():
            walk(child, [*path, name])

    walk(typer.main.get_command(app), [])
    return found


def test_help_is_a_table_of_contents(toolrl) -> None:
    result = toolrl("--help")
    assert result.code == 0
    panels = [result.out.index(title) for title in ("─ Train ─", "─ Look ─", "─ Tools of the trade ─")]
    assert panels == sorted(panels)
    names = {path[0] for path in commands()}
    assert names >= {"train", "eval", "cold-start", "show", "ledger", "doctor", "sandbox", "presets", "config", "bench"}
    for name in names:
        assert re.search(rf"│ {name} +\S", result.out), name
    longest = max(len(line) for line in result.out[panels[0] :].splitlines())
    assert longest <= 140 and result.out.count("\n") < 40


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_command_says_what_it_does_and_gives_an_example(toolrl, path: list[str]) -> None:
    result = toolrl(*path, "--help")
    assert result.code == 0
    assert f"toolrl {' '.join(path)}" in result.out.split("Examples")[1]


def test_the_version_is_that_of_the_package(toolrl) -> None:
    import toolrl as package

    assert toolrl("--version").out == f"toolrl {package.__version__}\n"


def test_a_mistyped_command_names_the_nearest(toolrl) -> None:
    result = toolrl("trian", "quickstart-cpu")
    assert result.code == 2 and "'train'" in result.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "quickstart-cpu", "loop.stps=3"], "did you mean 'loop.steps'?"),
        (["train", "quikstart-cpu"], "did you mean 'quickstart-cpu'?"),
        (["train", "quickstart-cpu", "rollout.top_p=0.5", "--dry-run"], "rollout.top_p = 0.5: must be 1.0"),
        (["train", "nothing", "--resume"], "holds no runs; start one with `toolrl train quickstart-cpu`"),
        (["show", "nothing"], "no run 'nothing'"),
        (["ledger", "nothing"], "no run 'nothing'"),
        (["config", "show", "quickstart-cpu", "seed=x"], "seed = 'x': must be a whole number"),
        (["config", "keys", "zzzz"], "no setting holds 'zzzz'"),
        (["presets", "zzzz"], "unknown preset 'zzzz'"),
        (["train", "quickstart-cpu", "recipe=dappo"], "did you mean 'dapo'?"),
        (["sandbox", "run"], "give either the code or --file"),
    ],
)
def test_a_users_mistake_ends_with_code_2_and_no_traceback(toolrl, arguments: list[str], told: str) -> None:
    result = toolrl(*arguments)
    assert result.code == 2
    assert "error:" in result.err and told in result.err
    assert "Traceback" not in result.err


def test_debug_shows_the_traceback_wherever_it_stands(toolrl) -> None:
    for arguments in (["--debug", "train", "x"], ["train", "x", "--debug"]):
        with pytest.raises(ValueError, match="unknown preset"):
            main(arguments)


def test_a_dry_run_prints_config_and_placement_and_makes_nothing(toolrl, tmp_path: Path) -> None:
    result = toolrl("train", "quickstart-cpu", "--dry-run", "--quiet", "loop.steps=7")
    assert result.code == 0
    printed = result.out.partition("Placement")[0]
    (tmp_path / "again.yaml").write_text(printed)
    again = presets.load(str(tmp_path / "again.yaml"))
    assert (again.loop.steps, again.quiet) == (7, True)
    assert "rollout worker" in result.out and "learner rank" in result.out
    (tmp_path / "again.yaml").unlink()
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_this_machine_lacks(toolrl) -> None:
    result = toolrl("train", "math-4b", "--dry-run", "rollout.workers=4000")
    assert result.code == 0
    assert re.search(r"this machine lacks GPU: needs 4002", result.out)


def test_an_odd_setting_is_told_as_a_warning(toolrl) -> None:
    result = toolrl("train", "quickstart-cpu", "--dry-run", "learner.updates_per_batch=3")
    assert result.code == 0 and "warning: command line: learner.updates_per_batch = 3" in result.err


def test_help_and_dry_run_import_no_engine(tmp_path: Path) -> None:
    """In a process where importing one is an error, as in an environment without them."""
    asked = [["--help"], ["train", "--help"], ["train", "math-4b", "--dry-run"], ["config", "keys"], ["presets"]]
    blocked = f"""
import sys
sys.modules.update(dict.fromkeys({HEAVY!r}))
from toolrl.app.cli import main
for arguments in {asked}:
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
    print("done", *arguments)
"""
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("done ")] == [
        f"done {' '.join(arguments)}" for arguments in asked
    ]


def test_the_settings_import_no_engine() -> None:
    code = (
        "import sys, toolrl.config, toolrl.presets, toolrl.placement, toolrl.config_checks\n"
        "toolrl.presets.load('quickstart-cpu')\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    config = presets.load("quickstart-cpu", [f"runs_dir={tmp_path}"])
    made = []
    for _ in range(3):
        free = runs.with_free_name(config)
        RunFolder.create(free)
        made.append(free.name)
    assert made == ["quickstart-cpu", "quickstart-cpu-2", "quickstart-cpu-3"]
    assert runs.find_or_newest("quickstart-cpu", tmp_path).name == "quickstart-cpu-3"
    assert runs.find("quickstart-cpu", tmp_path).name == "quickstart-cpu"
    assert runs.find(str(tmp_path / "quickstart-cpu-2")).name == "quickstart-cpu-2"
    RunFolder.create(presets.load("quickstart-cpu", [f"runs_dir={tmp_path}", "name=quickstart-cpu-old"]))
    assert runs.find_or_newest("quickstart-cpu", tmp_path).name == "quickstart-cpu-3"


def test_resume_takes_the_stored_settings_with_overrides(toolrl, tmp_path: Path) -> None:
    RunFolder.create(presets.load("quickstart-cpu", ["name=mine", "seed=5", "loop.steps=3"]))
    result = toolrl("train", "mine", "--resume", "--dry-run", "loop.steps=9")
    assert result.code == 0, result.err
    assert "continuing runs/mine" in result.out
    assert "seed: 5" in result.out and "steps: 9" in result.out and "name: mine" in result.out


def run_with_trajectories(config: RunConfig) -> RunFolder:
    folder = RunFolder.create(config)
    turn = Turn("policy", [5, 6], [-0.5, -0.25], [1, 1], "stop", text="\\boxed{7}")
    answered = Trajectory(
        "t-1", "g-1", "gcd-1", 0, [1, 2], [turn], Outcome.ANSWERED, answer="7", rewards={"outcome": 1.0}
    )
    silent = Trajectory("t-2", "g-1", "gcd-1", 1, [1, 2], [turn], Outcome.NO_ANSWER)
    for step in (2, 4):
        trajectory_parquet.write(folder.trajectories_of(step), [answered, silent])
    with MetricsLog(folder.path, tensorboard=False) as log:
        log.write(4, 4, 1.0, {})
    return folder


def test_show_prints_the_last_step_or_the_one_asked_for(toolrl) -> None:
    run_with_trajectories(presets.load("quickstart-cpu", ["name=seen"]))
    last = toolrl("show", "seen")
    assert last.code == 0 and "seen, step 4" in last.out and "\\boxed{7}" in last.out
    assert "mean log-probability -0.375" in last.out and "staleness 2" in last.out
    one = toolrl("show", "seen", "--step", "2", "--outcome", "no_answer")
    assert "t-2" in one.out and "t-1" not in one.out
    assert "closest --step 4" in toolrl("show", "seen", "--step", "9").err
    assert "stored: ?: answered, ?: no_answer" in toolrl("show", "seen", "--outcome", "stale").err


def test_ledger_prints_the_account_of_a_runs_file(toolrl) -> None:
    config = presets.load("quickstart-cpu", ["name=kept"])
    folder = RunFolder.create(config)
    assert "no ledger yet" in toolrl("ledger", "kept").err
    store = ReplayStore(folder.ledger, ReplaySettings.of(config))
    store.issue(2)
    store.close()
    shown = toolrl("ledger", "kept")
    assert shown.code == 0 and "balances: 16 issued = 16" in shown.out
    account = json.loads(toolrl("ledger", str(folder.path), "--json").out)
    assert (account["issued"], account["balances"]) == (16, True)


def test_bench_finds_measurements_runs_them_and_keeps_their_numbers(toolrl, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "adding_up.py").write_text(
        '"""How fast numbers add up.\n\nMore words.\n"""\n\n\ndef run() -> dict:\n'
        '    return {"rows": [{"n": 10, "ratio": sum(range(11)) / 55}, {"n": 20, "ratio": 1.5}]}\n'
    )
    (tmp_path / "benchmarks" / "no_measurement.py").write_text("raise RuntimeError\n")
    listed = toolrl("bench")
    assert "adding-up" in listed.out and "How fast numbers add up." in listed.out and "no-measurement" not in listed.out
    assert toolrl("bench", "adding-up").code == 0
    record = json.loads((tmp_path / "bench-results" / "adding-up.json").read_text())
    assert record["result"]["rows"][0] == {"n": 10, "ratio": 1.0}
    assert "did you mean 'adding-up'?" in toolrl("bench", "adding").err


def test_config_keys_finds_a_setting_by_a_word_of_its_meaning(toolrl) -> None:
    found = toolrl("config", "keys", "staleness").out
    assert "buffer.max_staleness" in found and "0 is synchronous" in found
    assert "loop.steps" not in found


def test_a_preset_can_be_printed_to_start_from(toolrl, tmp_path: Path) -> None:
    printed = toolrl("presets", "quickstart-cpu").out
    (tmp_path / "mine.yaml").write_text(printed)
    assert presets.load(str(tmp_path / "mine.yaml")) == presets.load("quickstart-cpu")


def test_presets_and_recipes_are_listed_apart_and_a_recipe_can_be_printed(toolrl) -> None:
    listed = toolrl("presets").out
    assert listed.index("preset ") < listed.index("quickstart-cpu") < listed.index("recipe ") < listed.index("dapo")
    assert toolrl("presets", "dapo").out.startswith("# DAPO: clip-higher")


def test_a_dry_run_shows_the_recipe(toolrl) -> None:
    printed = toolrl("train", "math-4b", "recipe=dapo", "learner.learning_rate=2e-6", "--dry-run").out
    assert "recipe: dapo" in printed and "clip_high: 0.28" in printed and "learning_rate: 2.0e-06" in printed


def test_doctor_judges_by_what_the_quickstart_needs(toolrl) -> None:
    from toolrl.app.doctor import Finding, can_run_quickstart

    result = toolrl("doctor", "--json")
    told = json.loads(result.out)
    rows = {row["component"]: row for row in told["findings"]}
    assert {"Python", "torch", "vllm", "ray", "deepspeed", "cores", "memory", "/dev/shm", "GPU", "bubblewrap"} <= set(
        rows
    )
    assert all(row["state"] == "ok" or (row["meaning"] and row["remedy"]) for row in rows.values() if row["needed"])
    assert result.code == (0 if told["quickstart"] else 1)
    assert not can_run_quickstart([Finding("ray", "not installed", "missing", needed=True)])
    assert can_run_quickstart([Finding("GPU", "none", "limited"), Finding("Docker engine", "none", "missing")])
