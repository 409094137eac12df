"""Solvers and plans of cold-start traces: programs that are right, mistakes in the shares asked for."""

from __future__ import annotations

import contextlib
import io
from collections import Counter

import pytest

from toolrl import tasks
from toolrl.app.cold_start_plan import plan, wrong
from toolrl.app.cold_start_solvers import NoSolver, programs, solvers
from toolrl.config import ColdStartConfig, FamilyConfig, TaskConfig
from toolrl.tasks import Task
from toolrl.tasks.verifiers import equal


def source_of(family: str, **options: object) -> tasks.TaskSource:
    return tasks.build(TaskConfig(families=[FamilyConfig(family, options=options)], held_out_tasks=4), seed=5)


def outputs(codes: list[str]) -> list[str]:
    """What each program prints, run one after the other in one namespace."""
    names: dict[str, object] = {}
    printed = []
    for code in codes:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        printed.append(out.getvalue().strip())
    return printed


@pytest.mark.parametrize("family", solvers.names())
@pytest.mark.parametrize("calls", [1, 2, 4])
def test_every_solver_computes_the_answer_of_its_family(family: str, calls: int) -> None:
    source = source_of(family)
    for index in range(150):
        task = source.task(index)
        codes = programs(family, task.question, calls)
        assert len(codes) == calls
        assert equal(outputs(codes)[-1], task.ground_truth), (task.question, codes, task.ground_truth)


def test_a_long_chain_is_split_into_partial_sums() -> None:
    question = "State the final answer to the following arithmetic problem: 12 + 34 - 5 + 7 ="
    assert programs("chain_sum", question, 3) == ["x = 12 + 34; print(x)", "x = x - 5; print(x)", "print(x + 7)"]
    assert programs("chain_sum", question, 1) == ["print(12 + 34 - 5 + 7)"]


def test_a_family_without_solver_is_refused_with_what_to_do() -> None:
    with pytest.raises(NoSolver, match=r"'leg_counting' have no cold-start solver.*traces_path.*chain_sum"):
        programs("leg_counting", "How many legs?", 1)


def test_a_question_that_a_solver_does_not_understand_is_refused() -> None:
    with pytest.raises(NoSolver, match="finds no"):
        programs("gcd", "Find the GCD of 12", 1)


@pytest.mark.parametrize("family", ["chain_sum", "products", "gcd", "lcm", "count_bits"])
def test_wrong_code_runs_and_is_mostly_wrong(family: str) -> None:
    import random

    source = source_of(family)
    missed = 0
    for index in range(100):
        task = source.task(index)
        code = wrong(programs(family, task.question, 1)[0], random.Random(index))
        assert code != programs(family, task.question, 1)[0]
        missed += not equal(outputs([code])[0], task.ground_truth)
    assert missed >= 80


def test_mistakes_come_in_the_shares_asked_for() -> None:
    task = source_of("gcd").task(0)
    config = ColdStartConfig(
        direct_guess_share=0.4, malformed_call_share=0.1, wrong_code_share=0.2, retry_share=0.3, max_calls=1
    )
    drawn = [plan(task, config, 0, index) for index in range(4000)]
    kinds = Counter(each.kind for each in drawn)
    for kind, share in {"direct": 0.4, "malformed": 0.1, "wrong_code": 0.2, "solved": 0.3}.items():
        assert kinds[kind] / len(drawn) == pytest.approx(share, abs=0.03), kind
    calling = [each for each in drawn if each.kind in ("wrong_code", "solved")]
    failing = [each for each in calling if each.first_call_fails]
    assert len(failing) / len(calling) == pytest.approx(0.3, abs=0.03)
    assert sum(each.gives_up for each in failing) / len(failing) == pytest.approx(0.4, abs=0.05)


def test_a_start_without_mistakes_makes_none() -> None:
    task = source_of("gcd").task(0)
    drawn = [plan(task, ColdStartConfig(retry_share=0.0, min_calls=3, max_calls=3), 0, index) for index in range(50)]
    assert all(each.kind == "solved" and not each.first_call_fails and len(each.programs) == 3 for each in drawn)


def test_plans_depend_on_seed_and_index_alone() -> None:
    task = Task("t", "chain_sum", [{"role": "user", "content": "1: 12 + 34 ="}], "46", "reasoning_gym")
    config = ColdStartConfig(direct_guess_share=0.3, wrong_code_share=0.3)
    forward = [plan(task, config, 3, index) for index in range(40)]
    backward = [plan(task, config, 3, index) for index in reversed(range(40))]
    assert forward == backward[::-1]
    assert forward != [plan(task, config, 4, index) for index in range(40)]
