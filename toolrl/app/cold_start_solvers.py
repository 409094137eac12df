"""Programs that solve a family's questions, for cold-start traces: one solver a family.

Invariants:
- A solver reads the question's text alone, as the policy will; numbers are copied as they are written.
- It gives one program for each call of the trace, in order. The last one prints the answer.
- A program reads no name but those that earlier programs of its question set: one interpreter session serves many
  traces.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from toolrl.errors import UserError
from toolrl.registry import Registry

Solver = Callable[[str, int], list[str]]  # question, number of calls -> that many programs

solvers: Registry[Solver] = Registry("cold-start solver")

_CHAIN = re.compile(r"-?\d+(?:\.\d+)?(?: [-+*/] -?\d+(?:\.\d+)?)+")
_ARITHMETIC = re.compile(r"[-+(\d][\d\s.()+*/-]*\d(?:\s*\))*")
_LIST = re.compile(r"\d+(?:, \d+)+")
_INTEGER = re.compile(r"\d+")


class NoSolver(UserError):
    """Traces cannot be generated for a task; the message says what to do instead."""


def programs(family: str, question: str, calls: int) -> list[str]:
    """[calls] the programs of a trace for this question.

    Raises:
        NoSolver: the family has no solver, or its solver does not understand the question.
    """
    if family not in solvers:
        raise NoSolver(
            f"tasks of family {family!r} have no cold-start solver, so no traces can be generated for them; give "
            f"ready-made traces with cold_start.traces_path=FILE, skip the cold start with cold_start.steps=0, or use "
            f"families that have one: {', '.join(solvers.names())}"
        )
    made = solvers.get(family)(question, calls)
    if len(made) != calls:
        raise NoSolver(f"cold-start solver {family!r} gave {len(made)} programs instead of {calls} for {question!r}")
    return made


def _found(pattern: re.Pattern[str], question: str, family: str) -> str:
    found = pattern.search(question)
    if found is None:
        raise NoSolver(f"cold-start solver {family!r} finds no {pattern.pattern!r} in the question {question!r}")
    return found.group(0).strip()


def _again(program: str, calls: int) -> list[str]:
    """The further calls compute the same once more: to check a result is a habit worth showing."""
    return [program] * calls


@solvers.register("chain_sum")
def chain_sum(question: str, calls: int) -> list[str]:
    """`12 + 34 - 5`: partial sums in a variable, one call each, then the rest in one call."""
    return _chain(_found(_CHAIN, question, "chain_sum"), calls)


@solvers.register("decimal_chain_sum")
def decimal_chain_sum(question: str, calls: int) -> list[str]:
    expression = _found(_CHAIN, question, "decimal_chain_sum")
    exact = re.sub(r"\d+(?:\.\d+)?", lambda number: f"D('{number.group(0)}')", expression)
    return _again(f"from decimal import Decimal as D; print({exact})", calls)


@solvers.register("products")
def products(question: str, calls: int) -> list[str]:
    return _chain(_found(_CHAIN, question, "products"), calls)


@solvers.register("basic_arithmetic")
def basic_arithmetic(question: str, calls: int) -> list[str]:
    expression = _found(_ARITHMETIC, question, "basic_arithmetic")
    # reasoning_gym's division is exact where it occurs: the answers are whole numbers.
    return _again(f"print({expression.replace('/', '//')})", calls)


@solvers.register("gcd")
def gcd(question: str, calls: int) -> list[str]:
    return _again(f"import math; print(math.gcd({_found(_LIST, question, 'gcd')}))", calls)


@solvers.register("lcm")
def lcm(question: str, calls: int) -> list[str]:
    return _again(f"import math; print(math.lcm({_found(_LIST, question, 'lcm')}))", calls)


@solvers.register("count_bits")
def count_bits(question: str, calls: int) -> list[str]:
    number = _found(re.compile(r"\d+(?=\?)"), question, "count_bits")
    return _again(f"print(bin({number}).count('1'))", calls)


def _chain(expression: str, calls: int) -> list[str]:
    """Splits a chain at its operators: `x = 1 + 2; print(x)`, `x = x - 3; print(x)`, …; the last call does the rest."""
    first, *rest = re.split(r" (?=[-+*] )", expression)
    if calls == 1 or len(rest) < 2 or ("*" in expression and ("+" in expression or " - " in expression)):
        return _again(f"print({expression})", calls)
    partial = min(calls, len(rest)) - 1
    made = []
    left = first
    for operand in rest[:partial]:
        made.append(f"x = {left} {operand}; print(x)")
        left = "x"
    made.append(f"print({' '.join([left, *rest[partial:]])})")
    return made + [f"print({expression})"] * (calls - len(made))
