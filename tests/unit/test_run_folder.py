"""A run's folder: which checkpoints count, which are removed, and what a folder that cannot be is told as."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toolrl import presets
from toolrl.app.model_folder import make_folder
from toolrl.app.run_folder import RunFolder, checkpoint_is_due
from toolrl.config import LoopConfig
from toolrl.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(presets.load("quickstart-cpu", [f"runs_dir={tmp_path}/with space", "name=run"]))


def save(folder: RunFolder, step: int) -> None:
    folder.checkpoint(step).mkdir()
    (folder.checkpoint(step) / "weights").write_text(str(step))
    folder.save_checkpoint_state(step, step + 1)


def steps(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.iterdir())


def test_a_new_run_has_settings_versions_and_no_checkpoint(folder: RunFolder) -> None:
    assert (folder.path / "config.yaml").is_file() and (folder.path / "versions.json").is_file()
    assert folder.latest_checkpoint() is None
    assert presets.load(str(folder.path / "config.yaml"), []).name == "run"


def test_a_run_is_finished_when_what_its_last_step_came_to_is_exported(folder: RunFolder) -> None:
    save(folder, 10)
    assert not folder.is_finished(10)
    folder.mark_finished(10)
    assert folder.is_finished(10) and folder.is_finished(8) and not folder.is_finished(11)


def test_the_number_of_workers_that_a_run_was_scaled_to_is_that_of_its_continuation(folder: RunFolder) -> None:
    settings, before = folder.path / "config.yaml", presets.load(str(folder.path / "config.yaml"), [])
    folder.keep_workers(3)
    after = presets.load(str(settings), [])
    assert after.rollout.workers == 3 != before.rollout.workers
    after.rollout.workers = before.rollout.workers
    assert after == before  # nothing else changes
    RunFolder.check_resumable(presets.load(str(settings), ["rollout.workers=2"]))  # who resumes it has the last word


def test_a_checkpoint_that_was_never_finished_is_none(folder: RunFolder) -> None:
    save(folder, 9)
    save(folder, 10)
    folder.checkpoint(11).mkdir()
    (folder.checkpoint(11) / "weights").write_text("half")
    (folder.checkpoint(11) / "state.json.partial").write_text('{"step": 11, "version": 12}')
    state = folder.latest_checkpoint()
    assert state is not None
    assert (state.step, state.version, state.path) == (10, 11, folder.checkpoint(10))  # 10 is later than 9


def test_pruning_keeps_the_newest_and_removes_what_never_became_whole(folder: RunFolder) -> None:
    for step in (2, 4, 9, 10):
        save(folder, step)
    folder.checkpoint(6).mkdir()
    folder.prune_checkpoints(2)
    assert steps(folder) == ["step-10", "step-9"]
    folder.prune_checkpoints(5)
    assert steps(folder) == ["step-10", "step-9"]
    assert (folder.checkpoint(9) / "weights").read_text() == "9"


def test_opening_a_run_again_keeps_its_checkpoints(folder: RunFolder, tmp_path: Path) -> None:
    save(folder, 3)
    again = RunFolder.create(presets.load("quickstart-cpu", [f"runs_dir={tmp_path}/with space", "name=run"]))
    state = again.latest_checkpoint()
    assert state is not None and state.step == 3


@pytest.mark.parametrize(
    ("override", "key"),
    [("model.on_rewritten_history=split", "model.on_rewritten_history"), ("seed=1", "seed"), ("learner.ranks=2", "learner.ranks"),
     ("learner.zero_stage=2", "learner.zero_stage")],
)  # fmt: skip
def test_a_resumed_run_keeps_what_its_checkpoints_depend_on(
    folder: RunFolder, tmp_path: Path, override: str, key: str
) -> None:
    save(folder, 3)
    stored = (folder.path / "config.yaml").read_text()
    places = [f"runs_dir={tmp_path}/with space", "name=run"]
    with pytest.raises(UserError, match=rf"{key} was .* would be .*resume it without the change"):
        RunFolder.check_resumable(presets.load("quickstart-cpu", [*places, override]))
    assert (folder.path / "config.yaml").read_text() == stored
    RunFolder.check_resumable(presets.load("quickstart-cpu", [*places, "loop.steps=7", "learner.learning_rate=1e-5"]))


def test_without_a_checkpoint_the_learner_may_still_change(folder: RunFolder, tmp_path: Path) -> None:
    places = [f"runs_dir={tmp_path}/with space", "name=run"]
    RunFolder.check_resumable(presets.load("quickstart-cpu", [*places, "learner.ranks=2"]))
    with pytest.raises(UserError, match="seed was 0"):
        RunFolder.check_resumable(presets.load("quickstart-cpu", [*places, "learner.ranks=2", "seed=1"]))


def test_a_run_is_trained_by_one_process_at_a_time(folder: RunFolder) -> None:
    script = (
        "import sys; from pathlib import Path; from toolrl.app.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).held():\n print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match=f"run run is being trained by process {other.pid}"), folder.held():
        pass
    other.kill()  # as by a user who has lost patience
    other.communicate()
    for _ in range(2):
        with folder.held():
            assert (folder.path / "lock").read_text() == str(os.getpid())


def test_a_place_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "runs", Path("/proc/nothing/here")):
        with pytest.raises(UserError, match=r"cannot be written .* --runs-dir"):
            make_folder(path)


@pytest.mark.parametrize(("every", "due"), [(0, [7]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (9, [7])])
def test_checkpoints_come_every_so_many_steps_and_after_the_last(every: int, due: list[int]) -> None:
    loop = LoopConfig(steps=7, checkpoint_every_steps=every)
    assert [step for step in range(1, 8) if checkpoint_is_due(step, loop)] == due


def save_good(folder: RunFolder, step: int, *, is_good: bool) -> None:
    folder.checkpoint(step).mkdir()
    folder.save_checkpoint_state(step, step + 1, guards={"rules": {"r": step}}, is_good=is_good)


def test_a_roll_back_goes_to_the_newest_good_checkpoint_that_is_old_enough(folder: RunFolder) -> None:
    assert folder.good_checkpoint(100) is None
    for step, is_good in ((0, True), (4, True), (8, True), (9, False)):
        save_good(folder, step, is_good=is_good)
    assert [getattr(folder.good_checkpoint(before), "step", None) for before in (100, 9, 8, 7, 3)] == [8, 8, 8, 4, 0]
    shutil.rmtree(folder.checkpoint(0))
    found = folder.good_checkpoint(3)
    assert found is not None and found.step == 4, "none is so old: the oldest good one"
    assert found.guards == {"rules": {"r": 4}}


def test_a_removed_checkpoint_is_none_and_its_step_can_be_saved_again(folder: RunFolder) -> None:
    save_good(folder, 3, is_good=False)
    folder.remove_checkpoint(3)
    folder.remove_checkpoint(4)
    assert folder.checkpoint_states() == []
    save_good(folder, 3, is_good=True)
    assert [state.is_good for state in folder.checkpoint_states()] == [True]


def test_pruning_keeps_the_newest_good_one(folder: RunFolder) -> None:
    for step in (1, 2, 3, 4, 5):
        save_good(folder, step, is_good=step in (1, 2))
    folder.prune_checkpoints(2)
    assert steps(folder) == ["step-2", "step-4", "step-5"]
