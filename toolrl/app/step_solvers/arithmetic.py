"""Chained arithmetic, one operation a call: sums, products, expressions with parentheses."""

from __future__ import annotations

import ast
import re

from toolrl.app.cold_start_solvers import NoSolver
from toolrl.app.step_solvers.steps import Step, grows_with, step_solvers

_NUMBER = r"-?\d+(?:\.\d+)?"
_CHAIN = re.compile(rf"{_NUMBER}(?: [-+*] {_NUMBER})+")
_EXPRESSION = re.compile(r"[-+(\d][\d\s.()+*/-]*\d(?:\s*\))*")
_SIGNS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "//"}


@step_solvers.register("chain_sum")
@grows_with("min_terms", "max_terms")
def chain_sum(question: str, calls: int) -> list[Step]:
    """`12 + 34 - 5`: one operation a call; a term of 0 changes nothing and is left out."""
    first, *rest = _operations(found(_CHAIN, question, "chain_sum"))
    return _running(first[1], [(sign, term) for sign, term in rest if float(term)])


@step_solvers.register("decimal_chain_sum")
@grows_with("min_terms", "max_terms")
def decimal_chain_sum(question: str, calls: int) -> list[Step]:
    """The same with exact decimals."""
    first, *rest = _operations(found(_CHAIN, question, "decimal_chain_sum"))
    # A decimal of value 0 still counts: it may give the sum another digit.
    steps = _running(f"D('{first[1]}')", [(sign, f"D('{term}')") for sign, term in rest])
    return [Step(f"from decimal import Decimal as D; {steps[0].code}", steps[0].show), *steps[1:]] if steps else []


@step_solvers.register("products")
@grows_with("min_digits", "max_digits", "min_terms", "max_terms")
def products(question: str, calls: int) -> list[Step]:
    """Long multiplication: the product with each digit of the next factor, added up; digits of 0 add nothing."""
    (_, product), *factors = _operations(found(_CHAIN, question, "products"))
    steps = []
    for number, (_, factor) in enumerate(factors):
        sign, digits = ("-" if factor.startswith("-") else ""), factor.lstrip("-")
        places = [(digit, len(digits) - 1 - at) for at, digit in enumerate(digits) if digit != "0"] or [("0", 0)]
        for at, (digit, zeros) in enumerate(reversed(places)):
            take = f"x = {product}; " if number == 0 and at == 0 else "x = t; " if at == 0 else ""
            total = "t = " if at == 0 else "t = t + "
            steps.append(Step(f"{take}{total}x * {sign}{digit}{'0' * zeros}", "t"))
    return steps


@step_solvers.register("basic_arithmetic")
@grows_with("min_terms", "max_terms")
def basic_arithmetic(question: str, calls: int) -> list[Step]:
    """An expression from the inside out: one operation a call, each result under a name of its own."""
    expression = found(_EXPRESSION, question, "basic_arithmetic")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError as error:
        raise NoSolver(f"step solver 'basic_arithmetic' does not read {expression!r}: {error.msg}") from error
    steps: list[Step] = []
    _compute(tree, steps)
    return steps


def found(pattern: re.Pattern[str], question: str, family: str) -> str:
    """What a solver looks for in its question. Raises NoSolver where it is not there."""
    match = pattern.search(question)
    if match is None:
        raise NoSolver(f"step solver {family!r} finds no {pattern.pattern!r} in the question {question!r}")
    return match.group(0)


def _operations(chain: str) -> list[tuple[str, str]]:
    """(sign, number) of each operand; the first one's sign is empty."""
    parts = chain.split(" ")
    return [("", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]


def _running(first: str, rest: list[tuple[str, str]]) -> list[Step]:
    left, steps = first, []
    for sign, operand in rest:
        steps.append(Step(f"x = {left} {sign} {operand}", "x"))
        left = "x"
    return steps


def _compute(node: ast.expr, steps: list[Step]) -> str:
    """The text that stands for a node's value in a later step, after the steps that compute it."""
    match node:
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _SIGNS:
            first, second = _compute(left, steps), _compute(right, steps)
            name = f"x{len(steps) + 1}"
            # reasoning_gym's division is exact where it occurs: the answers are whole numbers.
            steps.append(Step(f"{name} = {first} {_SIGNS[type(kind)]} {second}", name))
            return name
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _compute(operand, steps)
            return f"(-{inner})" if inner.startswith(("(", "-")) else f"-{inner}"
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _compute(operand, steps)
        case ast.Constant(value=value) if isinstance(value, int | float):
            return str(value)
    raise NoSolver(f"step solver 'basic_arithmetic' does not know {ast.unparse(node)!r}")
