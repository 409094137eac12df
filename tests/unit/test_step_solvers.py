"""Solvers of one step a call: right answers, enough calls, and no call that could be left out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.unit.test_cold_start_solvers import outputs, source_of
from tests.unit.test_cold_start_traces import CONFIG, HereInterpreter, maker
from toolrl import presets, tasks
from toolrl.app.cold_start import check_cold_start
from toolrl.app.cold_start_dense import beyond_limits, why_not_dense
from toolrl.app.cold_start_solvers import NoSolver
from toolrl.app.step_solvers import Step, TooFewSteps, check_families, step_programs, step_solvers
from toolrl.app.step_solvers.needed import unneeded
from toolrl.app.step_solvers.steps import merged
from toolrl.config import ColdStartConfig, FamilyConfig, RunConfig, TaskConfig
from toolrl.errors import ConfigError, UserError
from toolrl.tasks import verifiers
from toolrl.trajectory import Trajectory

# Options with which a family's questions take nine steps, as docs/cold-start.md gives them.
LONG: dict[str, dict[str, Any]] = {
    "basic_arithmetic": {"min_terms": 10, "max_terms": 12},
    "chain_sum": {"min_terms": 10, "max_terms": 14},
    "count_bits": {},
    "count_primes": {},
    "decimal_chain_sum": {"min_terms": 10, "max_terms": 14},
    "gcd": {"min_value": 100_000, "max_value": 10_000_000},
    "lcm": {"min_value": 100_000, "max_value": 10_000_000},
    "leg_counting": {"min_animals": 12, "max_animals": 15},
    "prime_factorization": {"min_value": 1000, "max_value": 1_000_000},
    "products": {"min_digits": 10, "max_digits": 12},
}
DENSE = ColdStartConfig(steps=1, traces=24, dense=True, min_calls=9, max_calls=12, retry_share=0.2)


def dense(*families: str, **changes: Any) -> RunConfig:
    mix = TaskConfig(families=[FamilyConfig(f, options=LONG[f]) for f in families], held_out_tasks=4)
    rollout = replace(CONFIG.rollout, max_calls=13, max_turns=14)
    return replace(CONFIG, tasks=mix, rollout=rollout, cold_start=replace(DENSE, **changes))


def made(config: RunConfig) -> list[Trajectory]:
    return asyncio.run(maker(config, interpreter := HereInterpreter()).make(interpreter))


def test_every_solver_has_options_that_make_long_traces() -> None:
    assert sorted(LONG) == step_solvers.names()


@pytest.mark.parametrize("family", step_solvers.names())
def test_every_call_is_needed_and_the_last_one_prints_the_answer(family: str) -> None:
    """Each trace is run whole, and again without each of its calls: then it fails or comes to something else."""
    source = source_of(family, **LONG[family])
    check = verifiers.load("reasoning_gym")
    traces = spared = 0
    for index in range(45):
        task = source.task(index)
        try:
            codes = step_programs(family, task.question, 12, 9)
        except TooFewSteps:
            continue
        whole = outputs(codes)
        if any(before == after for before, after in pairwise(whole)):
            continue  # such a one is not kept, see why_not_dense
        traces += 1
        assert 9 <= len(codes) <= 12 and unneeded(codes) == []
        assert verifiers.equal(whole[-1], task.ground_truth) or check(whole[-1], task.ground_truth, task.details) == 1
        for left_out in range(len(codes)) if traces <= 5 else ():
            try:
                rest = outputs(codes[:left_out] + codes[left_out + 1 :])
            except (NameError, ZeroDivisionError, IndexError):
                continue
            spared += rest[-1] == whole[-1]
    assert traces >= 4
    assert spared == 0


@pytest.mark.parametrize("family", step_solvers.names())
def test_nothing_that_a_call_computed_is_written_into_a_later_one(family: str) -> None:
    """Results of three digits and more come from the interpreter, under their names; the text does not give them away."""
    source = source_of(family, **LONG[family])
    for index in range(30):
        task = source.task(index)
        try:
            codes = step_programs(family, task.question, 12, 9)
        except TooFewSteps:
            continue
        for code, printed in zip(codes[1:], outputs(codes), strict=False):
            seen = [word.strip("[],") for word in printed.split()]
            assert not [word for word in seen if len(word) > 3 and word in code and word not in task.question]


def test_more_steps_than_calls_are_taken_together_and_fewer_are_never_filled_up() -> None:
    steps = [Step(f"x = x + {n}", "x") for n in range(5)]
    assert merged(steps, 5)[4] == "x = x + 4; print(x)"
    assert merged(steps, 2) == ["x = x + 0\nx = x + 1\nprint(x)", "x = x + 2\nx = x + 3\nx = x + 4\nprint(x)"]
    with pytest.raises(TooFewSteps, match="takes 2 calls, 9 are asked for"):
        step_programs("chain_sum", "State the final answer to: 12 + 34 - 5 =", 12, 9)


@pytest.mark.parametrize(
    ("programs", "idle"),
    [
        (["x = 1 + 2; print(x)", "x = x + 3; print(x)", "print(x + 4)"], []),
        (["x = 1 + 2; print(x)", "print(1 + 2)", "print(x + 4)"], [1]),  # looks, changes nothing
        (["x = 1 + 2; print(x)", "y = x + 3; print(y)", "print(x + 4)"], [1]),  # what it sets is never read
        (["x = 1 + 2; print(x)", "x = 5; print(x)", "print(x + 4)"], [0]),  # set anew before it was read
        (["x = 1 + 2; print(x)", "print(1 + 2)"], [0, 1]),  # the answer without the state
        (["f = []; n = 12", "f.append(n // 2)", "print(f)"], []),  # a method changes its object
        (["d = {}; n = 3", "d[n] = 1", "print(d)"], []),
        (["def double(k):\n    return 2 * k", "x = double(4)", "print(x)"], []),
        (["k = 7; print(k)", "x = sum(k for k in range(3))", "print(x)"], [0]),  # another k
        (["x = 0; go = True", "if go: x = 5", "print(x)"], []),  # may not be set anew
    ],
)
def test_calls_that_do_nothing_for_the_answer_are_found(programs: list[str], idle: list[int]) -> None:
    assert unneeded(programs) == idle


# Whole traces -------------------------------------------------------------------------------------------------------------


def test_dense_traces_are_as_many_as_asked_for_and_each_has_its_calls() -> None:
    config = dense("chain_sum", "gcd", "prime_factorization")
    traces = made(config)
    assert len(traces) == 24 and len({trace.id for trace in traces}) == 24
    failed = 0
    for trace in traces:
        results = [result for of_turn in trace.results_of_turns() for result in of_turn]
        ran = [result for result in results if result.status == "ok"]
        assert 9 <= len(ran) <= 12 and trace.answer == ran[-1].text
        assert why_not_dense(trace, 9) is None and beyond_limits(trace, config.rollout) is None
        failed += sum(result.injected for result in results)
    assert {str(trace.metadata["family"]) for trace in traces} == {"chain_sum", "gcd", "prime_factorization"}
    assert 1 <= failed <= 12
    assert [trace.token_ids for trace in made(config)] == [trace.token_ids for trace in traces]


def test_a_trace_with_a_call_that_broke_or_changed_nothing_is_not_kept() -> None:
    (trace,) = made(dense("chain_sum", traces=1, retry_share=0.0))
    assert why_not_dense(trace, 9) is None
    assert "fewer than cold_start.min_calls=13" in str(why_not_dense(trace, 13))
    results = [turn.results[0] for turn in trace.turns if turn.kind == "tool"]
    results[3].status = "timeout"
    assert why_not_dense(trace, 3) == "a call did not run to its end (timeout)"
    results[3].status, results[3].text = "ok", results[2].text
    assert why_not_dense(trace, 3) == "a call changed nothing"


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"max_turn_tokens": 10}, "max_turn_tokens=10"),
        ({"max_response_tokens": 150}, "max_response_tokens=150"),
        ({"max_context_tokens": 200}, "max_context_tokens=200"),
        ({"max_turns": 9}, "max_turns=9"),
        ({"max_calls": 8}, "max_calls=8"),
    ],
)
def test_traces_that_the_policy_could_not_play_end_the_start_with_what_to_raise(limits: dict, told: str) -> None:
    config = dense("chain_sum")
    with pytest.raises(UserError, match=rf"0 traces are left of 48.*rollout\.{told} allows; raise it"):
        made(replace(config, rollout=replace(config.rollout, **limits)))


def test_a_family_whose_questions_are_too_short_is_refused_before_anything_runs() -> None:
    config = dense("gcd", "chain_sum")
    config.tasks.families[1].options = {"min_terms": 2, "max_terms": 3}
    source = tasks.build(config.tasks, 0)
    with pytest.raises(
        NoSolver, match=r"'chain_sum' takes so many steps \(at most 2\).*min_terms, max_terms.*traces_path"
    ):
        check_families(config, source, 0)
    with pytest.raises(NoSolver):
        check_cold_start(config, source)
    check_cold_start(replace(config, cold_start=replace(config.cold_start, traces_path="given.parquet")), source)
    unknown = replace(config, tasks=TaskConfig(families=[FamilyConfig("simple_equations")], held_out_tasks=2))
    with pytest.raises(NoSolver, match=r"'simple_equations' have no step solver.*dense=false"):
        check_families(unknown, tasks.build(unknown.tasks, 0), 0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["cold_start.direct_guess_share=0.1"], "kept for their right answers"),
        (["rollout.max_turns=12"], "one a turn, and an answer; set 14"),
        (["rollout.max_calls=12"], "up to 13 calls (cold_start.max_calls=12 and 1 that fail); set 13"),
        (["tools=[calculator]"], "calls of the tool python"),
    ],
)
def test_settings_that_leave_no_room_for_dense_traces_are_refused(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        presets.load("quickstart-cpu", ["recipe=dense-cold-start", *settings])
    assert told in str(refused.value)


def test_the_recipe_asks_for_nine_calls_and_raises_what_they_need() -> None:
    config = presets.load("single-gpu-1.5b", ["recipe=dense-cold-start"])
    assert (config.cold_start.dense, config.cold_start.min_calls, config.cold_start.steps) == (True, 9, 200)
    assert (config.rollout.max_calls, config.rollout.max_turns) == (13, 14)
    roomy = presets.load("math-4b", ["recipe=dense-cold-start"])
    assert (roomy.rollout.max_calls, roomy.rollout.max_turns) == (50, 32)  # what the preset has more of stays
