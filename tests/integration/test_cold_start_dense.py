"""Dense cold-start traces with the real sandbox and the real verifier, of every step solver."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.requirements import need

need("ray", "transformers")

from tests.unit.test_step_solvers import LONG
from toolrl import presets
from toolrl.app.cold_start import generate_traces, keep_traces, read_traces, write_traces
from toolrl.app.model_folder import prepare_model
from toolrl.app.step_solvers import Step, step_solvers
from toolrl.config import FamilyConfig, RunConfig
from toolrl.errors import UserError
from toolrl.trajectory import Trajectory

SETTINGS = [
    "name=dense",
    "recipe=dense-cold-start",
    "sandbox.backend=process",
    "sandbox.min_sessions=2",
    "rollout.max_turn_tokens=256",
    "rollout.max_response_tokens=3072",
    "rollout.max_context_tokens=4096",
    "cold_start.traces=30",
    "tasks.held_out_tasks=8",
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    config = presets.load("quickstart-cpu", [*SETTINGS, f"runs_dir={tmp_path_factory.mktemp('runs')}"])
    families = [FamilyConfig(family, options=options) for family, options in LONG.items()]
    return replace(config, tasks=replace(config.tasks, families=families))


@pytest.fixture(scope="module")
def traces(config: RunConfig) -> list[Trajectory]:
    return asyncio.run(generate_traces(config, prepare_model(config)))


def test_every_solvers_programs_run_in_the_sandbox_and_come_to_the_right_answer(traces: list[Trajectory]) -> None:
    """What is kept was scored by the family's own verifier; here the calls that really ran are counted again."""
    assert len(traces) == 30
    for trace in traces:
        results = [result for of_turn in trace.results_of_turns() for result in of_turn]
        ran = [result for result in results if not result.injected]
        assert len(ran) >= 9 and all(result.status == "ok" and result.wall_s > 0 for result in ran)
        assert trace.answer == ran[-1].text
    families = Counter(str(trace.metadata["family"]) for trace in traces)
    assert len(families) >= 7


async def test_wrong_answers_and_calls_that_fail_are_filtered_out(config: RunConfig) -> None:
    """Two solvers that err: one computes something else now and then, the other's fourth call fails."""
    right = step_solvers.get("chain_sum")

    def sloppy(question: str, calls: int) -> list[Step]:
        steps = right(question, calls)
        odd = len(question) % 2
        return [*steps[:-1], Step(steps[-1].code, "x + 1" if odd else "x")]

    def broken(question: str, calls: int) -> list[Step]:
        steps = right(question, calls)
        return [*steps[:3], Step("x = x // 0", "x"), *steps[4:]]

    families = [FamilyConfig("chain_sum", options=LONG["chain_sum"])]
    config = replace(
        config,
        name="errs",
        tasks=replace(config.tasks, families=families),
        cold_start=replace(config.cold_start, traces=4, retry_share=0.0),
    )
    model = prepare_model(config)
    step_solvers._entries["chain_sum"] = sloppy
    try:
        kept = await generate_traces(config, model)
        assert len(kept) == 4 and all(trace.answer == last_of(trace) for trace in kept)
        assert max(trace.sample_index for trace in kept) >= 4  # others were made, and taken the place of
        step_solvers._entries["chain_sum"] = broken
        with pytest.raises(UserError, match=r"0 traces are left of 16.*16 × a call did not run to its end \(error\)"):
            await generate_traces(config, model)
    finally:
        step_solvers._entries["chain_sum"] = right


def last_of(trace: Trajectory) -> str:
    return trace.results_of_turns()[-2][-1].text


async def test_given_traces_are_filtered_by_what_was_recorded(
    config: RunConfig, traces: list[Trajectory], tmp_path: Path
) -> None:
    short = replace(traces[0], id="short", turns=[*traces[0].turns[:6], traces[0].turns[-1]])
    keep_traces(tmp_path, [*traces[:3], short])
    given = replace(config, cold_start=replace(config.cold_start, traces_path=str(tmp_path / "traces.parquet")))
    assert len(read_traces(tmp_path / "traces.parquet")) == 4
    assert [trace.id for trace in await write_traces(given, Path(), tmp_path)] == [trace.id for trace in traces[:3]]
    more = replace(given, cold_start=replace(given.cold_start, min_calls=20))
    with pytest.raises(UserError, match=r"none of the 4 traces.*min_calls=20"):
        await write_traces(more, Path(), tmp_path)
