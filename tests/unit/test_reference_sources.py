"""Where references come from: a file, the cold start, and a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.episodes import ANSWER, CALL, TASK, call, play, tiny
from tests.unit.test_supervising import Remote
from toolrl import tasks, trajectory_parquet
from toolrl.app import reference_sources
from toolrl.app.run_folder import RunFolder
from toolrl.config import FamilyConfig, RunConfig, TaskConfig
from toolrl.errors import UserError
from toolrl.supervision import References
from toolrl.trajectory import Trajectory

WRONG = ANSWER.replace("408", "407")


class Told:
    """In place of a run's view."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def stage(self, text: str) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    made = RunFolder(tmp_path_factory.mktemp("run"))
    tiny().save_pretrained(made.model)
    return made


async def asked(question: str, *turns: str) -> Trajectory:
    return await play(*turns, task=replace(TASK, messages=[{"role": "user", "content": question}]))


def config(**references: Any) -> RunConfig:
    made = RunConfig()
    made.rewards.weights = {"outcome": 1.0}
    for name, value in references.items():
        setattr(made.supervision.references, name, value)
    return made


async def filled(config: RunConfig, folder: RunFolder) -> tuple[References, list[str]]:
    shelf, told = References(), Told()
    await reference_sources.fill(Remote(shelf), config, folder, told)
    return shelf, told.notes


async def test_a_file_gives_the_right_and_well_formed_trajectories_that_fit(tmp_path: Path, folder: RunFolder) -> None:
    right = await asked("17 * 24?", CALL, ANSWER)
    given = [
        right,
        await asked("17 + 24?", CALL, WRONG),
        await asked("malformed?", CALL[:-20], ANSWER),
        await asked("no call?", ANSWER),
        await asked("long?", *[call()] * 6, ANSWER),
    ]
    trajectory_parquet.write(tmp_path / "given.parquet", given)
    wanted = config(path=str(tmp_path / "given.parquet"), min_calls=1)
    wanted.rollout.max_context_tokens = len(right.token_ids)
    shelf, notes = await filled(wanted, folder)
    assert shelf.counts() == (1, 0) and shelf.for_task(right.prompt_ids) == right
    assert notes == ["references: 1 given"]
    wanted.supervision.references.min_calls = 0
    assert (await filled(wanted, folder))[0].counts() == (2, 0)


async def test_what_is_given_and_what_the_cold_start_showed_add_up(tmp_path: Path, folder: RunFolder) -> None:
    given, shown = await asked("a?", ANSWER), await asked("b?", CALL, ANSWER)
    trajectory_parquet.write(tmp_path / "given.parquet", [given])
    trajectory_parquet.write(tmp_path / "traces.parquet", [replace(given, turns=shown.turns), shown])
    wanted = config(path=str(tmp_path / "given.parquet"))
    wanted.cold_start.steps, wanted.cold_start.traces_path = 1, str(tmp_path / "traces.parquet")
    shelf, notes = await filled(wanted, folder)
    assert shelf.for_task(given.prompt_ids) == given and shelf.for_task(shown.prompt_ids) == shown
    assert notes == ["references: 1 given, 1 of the cold start"]
    wanted.supervision.references.cold_start = False
    assert (await filled(wanted, folder))[0].counts() == (1, 0)


async def test_a_file_of_another_models_tokens_is_refused(tmp_path: Path, folder: RunFolder) -> None:
    foreign = await asked("a?", CALL, ANSWER)
    foreign.turns[0].token_ids = [token + 1 for token in foreign.turns[0].token_ids]
    trajectory_parquet.write(tmp_path / "given.parquet", [foreign])
    with pytest.raises(
        UserError, match=r"references\.path: the tokens of trajectory .* are not those of the run's model"
    ):
        await filled(config(path=str(tmp_path / "given.parquet")), folder)
    with pytest.raises(UserError, match=r"references\.path: there is no file"):
        await filled(config(path=str(tmp_path / "none.parquet")), folder)


async def test_a_checkpoint_brings_back_the_runs_own_references(tmp_path: Path) -> None:
    shelf = References()
    shelf.keep([await asked("a?", ANSWER), await asked("b?", ANSWER)])
    await reference_sources.save_own(Remote(shelf), tmp_path)
    resumed = References()
    resumed.keep([await asked("c?", ANSWER)])
    await reference_sources.load_own(Remote(resumed), tmp_path)
    assert resumed.own_state() == shelf.own_state() and resumed.counts() == (2, 2)
    for nobody_asks in (reference_sources.save_own, reference_sources.load_own):
        await nobody_asks(None, tmp_path / "nowhere")


def test_tasks_that_the_cold_starts_programs_cannot_solve_are_refused_before_anything_starts() -> None:
    wanted = config(solved_tasks=4)
    for family, solvable in (("gcd", True), ("leg_counting", False)):
        wanted.tasks = TaskConfig(families=[FamilyConfig(family)], held_out_tasks=0)
        source = tasks.build(wanted.tasks, 0)
        if solvable:
            reference_sources.check(wanted, source)
            continue
        with pytest.raises(UserError, match=r"solved_tasks=4: task leg_counting-0 cannot be solved"):
            reference_sources.check(wanted, source)
        wanted.supervision.references.solved_tasks = 0
        reference_sources.check(wanted, source)


def test_nobody_is_started_where_nothing_asks_for_references() -> None:
    assert reference_sources.start(RunConfig()) is None
