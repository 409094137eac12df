"""Rewards of calls: what counts as one that succeeded, was valid, was of use; on hand-made episodes."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolrl.config import Named, RewardConfig, TaskConfig
from toolrl.rewards import RewardPipeline
from toolrl.rewards.code_similarity import code_of
from toolrl.rewards.provenance import uses_of_calls
from toolrl.rewards.working_code import names_of, working_code
from toolrl.tasks import AnswerChecker, Task
from toolrl.trajectory import CallError, Outcome, ToolCall, ToolResult, Trajectory, Turn

TASK = Task("t", "f", [{"role": "user", "content": "What is 17 * 24?"}], "408", "math")


def episode(*said: str | tuple[str, str] | tuple[str, str, str], answer: str | None = "408") -> Trajectory:
    """Turns of plain text, and (code, what came back, its status) for those that call."""
    made = Trajectory("t", "g", "t", 0, [1], outcome=Outcome.ANSWERED, answer=answer)
    for index, each in enumerate(said):
        turn = Turn("policy", [5], [-0.1], [0], "stop", text=each if isinstance(each, str) else "")
        made.turns.append(turn)
        if not isinstance(each, str):
            code, text, status = (*each, "ok")[:3]
            turn.calls = [ToolCall(f"call_{index}", "python", {"code": code})]
            made.turns.append(Turn("tool", [6], results=[ToolResult(f"call_{index}", "python", status, text)]))
    return made


async def turn_rewards(made: Trajectory, name: str, **options) -> list[float]:
    async with AnswerChecker(TaskConfig()) as checker:  # equal answers start no process
        await RewardPipeline(RewardConfig([Named(name, options)]), checker).score(made, TASK)
    assert made.outcome is Outcome.ANSWERED, made.metadata
    return [turn.rewards[name] for turn in made.policy_turns]


def use(made: Trajectory, **how) -> list[float]:
    return [each.use for each in uses_of_calls(made, ["What is 17 * 24?"], **how)]


CALL = ("print(17 * 24)", "408")
BOXED = "\\boxed{408}"


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([CALL, BOXED], [1.0]),
        ([CALL, "I do not trust it. \\boxed{407}"], [0.0]),
        ([CALL], [0.0]),
        (["It is 408, let me see.", CALL, BOXED], [0.0]),
        ([CALL, CALL, BOXED], [1.0, 0.0]),
        ([("print(408)", "408"), BOXED], [0.0]),
        ([("print(24)", "24"), "24 \\boxed{408}"], [0.0]),
        ([("pass", "(no output)"), "no output \\boxed{408}"], [0.0]),
        ([("# 17 * 24", "(no output)"), BOXED], [0.0]),
        ([("print(*range(400, 410))", " ".join(map(str, range(400, 410)))), BOXED], [1 / 9]),
        ([("f(17)", "1"), "\\boxed{1}"], [0.0]),
        ([("f(17)", "x"), "\\boxed{x}"], [0.0]),
        ([("f(17)", "True"), "True"], [0.0]),
        ([("f(17)", "Error: 408", "error"), BOXED], []),
        ([("f(17)", "3.3333333333333335"), "about 3.33"], [1.0]),
        ([("f(17)", "3.3333333333333335"), "about 3.34"], [0.0]),
        ([("f(17)", "3.3333333333333335"), "about 3.3"], [0.0]),
        ([("f(17)", "2.9996"), "about 3"], [0.0]),
        ([("f(17)", "1,234,567.50"), "1234567.5"], [1.0]),
        ([("f(17)", "-408"), BOXED], [1.0]),
        ([("search", "It lies in Łódź."), "łódź"], [0.5]),
    ],
)
def test_a_result_is_used_where_a_new_value_of_it_is_written_later(turns, expected):
    assert use(episode(*turns)) == pytest.approx(expected)


def test_trivial_values_count_where_there_is_other_evidence_beside():
    six = episode(("gcd(12, 18)", "6"), "\\boxed{6}")
    assert use(six) == [0.0] and use(six, trivial=True) == [1.0]
    assert use(episode(("print(6)", "6"), "\\boxed{6}"), trivial=True) == [0.0]
    assert use(episode(("pass", "(no output)"), "no output"), trivial=True) == [0.0]


def test_a_call_whose_names_a_used_call_reads_was_of_the_same_use():
    steps = [("a = 17\nb = 24", "(no output)"), ("junk = 9", "(no output)"), ("c = a * b", "(no output)"), ("c", "408")]
    assert use(episode(*steps, BOXED)) == [1.0, 0.0, 1.0, 1.0]
    assert use(episode(*steps, "\\boxed{7}")) == [0.0] * 4
    bound_again = [("a = 17", "(no output)"), ("a = 24", "(no output)"), ("a * 17", "408")]
    assert use(episode(*bound_again, BOXED)) == [0.0, 1.0, 1.0]


def test_a_late_result_is_used_only_after_it_was_shown():
    def late(*texts: str) -> Trajectory:
        made = Trajectory("t", "g", "t", 0, [1])
        for text in texts:
            made.turns.append(Turn("policy", [5], [-0.1], [0], text=text))
            made.turns.append(Turn("tool", [6]))
        made.turns[0].calls = [ToolCall("call_0", "python", {"code": "17 * 24"})]
        made.turns[1].results = [ToolResult("call_0", "python", "pending", "call_0: python is running")]
        made.turns[3].results = [ToolResult("call_0", "python", "ok", "Result of call_0:\n408")]
        return made

    (found,) = uses_of_calls(late("", "meanwhile", "408"))
    assert (found.turn, found.use, found.shown) == (0, 1.0, frozenset({"408"}))
    assert use(late("", "408 I guess", "it said 408")) == [0.0]


@given(st.decimals(min_value=100, max_value=10**12, places=3), st.sampled_from(["{}", "{:,}", "{:e}"]))
def test_a_number_is_the_same_however_it_is_written(number, form):
    made = episode(("f(x)", form.format(number)), str(number))
    assert use(made, trivial=True) == [1.0 if Decimal(form.format(number).replace(",", "")) == number else 0.0]


@given(st.text(max_size=200), st.text(max_size=80), st.text(max_size=200))
def test_any_text_has_a_use_from_none_to_all(shown, code, said):
    (found,) = use(episode((code, shown), said))
    assert 0 <= found <= 1


async def test_call_success_is_the_share_of_what_was_asked_that_came_to_something():
    assert await turn_rewards(episode(CALL, BOXED), "call_success") == pytest.approx([0.1, 0])
    failed = episode(("1 / 0", "Error", "error"), CALL, BOXED)
    failed.turns[0].call_errors = [CallError("bad_json", "no")]
    assert await turn_rewards(failed, "call_success", bonus=0.3) == pytest.approx([0, 0.1, 0])
    assert await turn_rewards(episode(CALL, "\\boxed{407}", answer=None), "call_success") == [0.0, 0.0]


async def test_result_use_is_a_mean_over_the_calls_that_came_back():
    twice = episode(CALL, ("print(2 ** 10)", "1024"), BOXED)
    assert await turn_rewards(twice, "result_use") == pytest.approx([0.05, 0, 0])
    assert await turn_rewards(episode(CALL, BOXED, answer=None), "result_use") == [0.0, 0.0]
    assert await turn_rewards(episode(CALL, BOXED, answer=None), "result_use", only_when_right=False) == [0.1, 0.0]


async def test_parse_failure_counts_every_piece_but_the_one_that_the_limit_cut():
    broken = CallError("bad_json", "no")
    made = episode("one", "two", "three")
    for turn, count in zip(made.policy_turns, (2, 0, 1), strict=True):
        turn.call_errors = [broken] * count
    made.policy_turns[2].finish_reason = "length"
    assert await turn_rewards(made, "parse_failure") == [-0.2, 0.0, 0.0]


async def test_call_validity_punishes_what_no_tool_can_take_and_what_was_answered_before():
    invalid = episode(("x", "Error: unknown tool", "invalid_call"), CALL, BOXED)
    assert await turn_rewards(invalid, "call_validity") == [-0.1, 0.0, 0.0]
    again = episode(CALL, CALL, CALL, BOXED)
    assert await turn_rewards(again, "call_validity", penalty=0.2) == [0.0, -0.2, -0.2, 0.0]
    busy = episode(("print(17 * 24)", "Error: python busy, try again", "error"), CALL, BOXED)
    assert await turn_rewards(busy, "call_validity") == [0.0, 0.0, 0.0], "to try again is no repetition"
    changed = episode(("n", "1"), ("n += 1", "(no output)"), ("n", "2"), BOXED)
    assert await turn_rewards(changed, "call_validity") == [0.0] * 4, "to look again is none either"


async def test_the_price_of_calls_ends_at_its_bound():
    five = episode(*[CALL] * 5, BOXED)
    assert await turn_rewards(five, "call_cost", cost=0.2, most=0.5) == pytest.approx([-0.2, -0.2, -0.1, 0, 0, 0])
    assert sum(await turn_rewards(episode(*[CALL] * 5, BOXED), "call_cost", cost=0.2)) == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("cells", "works"),
    [
        (["import math\n'''What it does'''\n# so\nprint(math.gcd(12, 18))"], "print(math.gcd(12, 18))"),
        (["import math\ndef solve():\n    return 1\nprint('start')"], ""),
        (["def f(x):\n    'doc'\n    return x * 2", "y = f(3)", "y"], "def f(x):\n    return x * 2\ny = f(3)\ny"),
        (["a = 1\nb = 2", "print(b + 1)"], "b = 2\nprint(b + 1)"),
        (["n = 0\nfor i in range(3):\n    n += i\nn"], "n = 0\nfor i in range(3):\n    n += i\nn"),
        (["print(6 * 7)", "print(6 * 7)"], "print(6 * 7)"),
        (["print([1, 2], -3, f'so')", "408", "pass"], ""),
        (["SELECT 1 +"], "SELECT 1 +"),
    ],
)
def test_working_code_is_what_has_a_part_in_what_is_shown(cells, works):
    assert working_code(cells) == works


_STATEMENTS = [
    "x = 1",
    "y = x + 2",
    "print(x)",
    "print(y)",
    "def f():\n    return y",
    "z = f()",
    "import os",
    "print('so')",
]


@given(st.lists(st.lists(st.sampled_from(_STATEMENTS), max_size=4).map("\n".join), max_size=4))
def test_what_works_of_code_works_alone(cells):
    once = working_code(cells)
    assert working_code([once]) == once


@given(st.lists(st.text(max_size=80), max_size=3))
def test_any_text_may_be_code(cells):
    working_code(cells)


def test_code_that_is_nested_deeply_is_taken_as_it_stands():
    for length in (100, 3000):
        long = " + ".join(["x"] * length)
        assert working_code([f"x = 1\nprint({long})"]).startswith("x = 1\nprint(x + x")


def test_what_a_parser_finds_odd_is_said_to_nobody():
    odd = "from toolrl.rewards.working_code import working_code\nworking_code(['print(\"\\\\d\", x)'])"
    done = subprocess.run([sys.executable, "-W", "default", "-c", odd], capture_output=True, text=True, check=True)
    assert "model code" not in done.stderr


def test_only_code_that_ran_is_code_of_a_trajectory():
    made = episode(("1 / zero", "NameError", "error"), ("print(6 * 7)", "42"), "42")
    made.turns[2].calls.append(ToolCall("other", "calculator", {"expression": "1"}))
    assert code_of(made) == "print(6 * 7)"


def test_names_of_a_cell_are_those_it_leaves_and_those_it_takes():
    names = names_of(
        "import numpy as np\nfor i in range(n):\n    t += i\nz = [k for k in q]\ndef f(a):\n    b = a + c\n    return b"
    )
    assert names.bound == {"np", "i", "t", "z", "k", "f"}
    assert names.read == {"n", "t", "q", "c"}
    assert names_of("a = 1\nb = a").read == frozenset() == names_of("no python(").bound == names_of(None).read
