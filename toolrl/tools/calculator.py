"""The tool `calculator`: arithmetic without a sandbox, on a parsed expression of known node types.

Every operation is bounded before it is carried out: no input takes more than a few milliseconds or kilobytes.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from toolrl.config import ToolConfig
from toolrl.errors import UserError
from toolrl.tools.protocol import Interpreter, function_schema, tools
from toolrl.trajectory import ToolCall, ToolResult

LONGEST_EXPRESSION = 1000  # characters
LARGEST_BITS = 4096  # of an integer
LARGEST_FACTORIAL = 400  # its value fits LARGEST_BITS
DESCRIPTION = (
    "Evaluate one arithmetic expression: + - * / // % **, parentheses, pi, e, and abs, round, min, max, gcd, lcm, "
    "factorial, sqrt, floor, ceil, exp, log, log2, log10, sin, cos, tan."
)
Number = int | float


class Refused(ValueError):
    """An expression that is not evaluated; says why."""


@tools.register("calculator")
def calculator(config: ToolConfig, interpreter: Interpreter | None) -> Calculator:
    """No options."""
    if config.options:
        raise UserError(f"tool 'calculator' takes no options, got {', '.join(config.options)}")
    return Calculator(timeout_s=config.timeout_s)


class Calculator:
    """Arithmetic; keeps nothing between calls."""

    name = "calculator"
    keeps_no_state = True
    schema = function_schema("calculator", DESCRIPTION, {"expression": "for example (3 + 4) * 12 / 7"})

    def __init__(self, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    @asynccontextmanager
    async def session(self, episode_id: str) -> AsyncIterator[Calculator]:
        yield self

    async def call(self, call: ToolCall) -> ToolResult:
        try:
            value = evaluate(call.arguments["expression"])
        except Refused as error:
            return ToolResult(call_id=call.id, name=call.name, status="error", text=f"Error: {error}")
        return ToolResult(call_id=call.id, name=call.name, status="ok", text=str(value))


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression. Raises Refused, and nothing else, for any text that is none."""
    if len(expression) > LONGEST_EXPRESSION:
        raise Refused(f"the expression has {len(expression)} characters, more than {LONGEST_EXPRESSION}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except Refused:
        raise
    except ZeroDivisionError as error:
        raise Refused("division by zero") from error
    except SyntaxError as error:
        raise Refused(f"not an arithmetic expression: {error.msg}") from error
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=value) if isinstance(value, int | float) and not isinstance(value, bool):
            return _bounded(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return _bounded(_OPERATORS[type(kind)](_value(left), _value(right)))
        case ast.BinOp(op=ast.BitXor()):
            raise Refused("^ is not a power; write **")
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
        case ast.Call(func=ast.Name(id=name)) | ast.Name(id=name):
            raise Refused(f"unknown name {name!r}")
    raise Refused(f"{type(node).__name__} is not arithmetic")


def _power(base: Number, exponent: Number) -> Number:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and math.log2(abs(base)) * abs(exponent) > LARGEST_BITS:
        raise Refused(f"{str(base)[:20]}**{str(exponent)[:20]} is too large")
    power: Number = base**exponent
    return power


def _bounded(value: Any) -> Number:
    if isinstance(value, complex):
        raise Refused("the result is not a real number")
    if isinstance(value, int):
        if value.bit_length() > LARGEST_BITS:
            raise Refused(f"a number with more than {LARGEST_BITS} bits")
        return value
    if not math.isfinite(value):
        raise Refused(f"the result is {value}")
    return float(value)


def _factorial(n: Number) -> int:
    if not isinstance(n, int) or not 0 <= n <= LARGEST_FACTORIAL:
        raise Refused(f"factorial takes a whole number from 0 to {LARGEST_FACTORIAL}")
    return math.factorial(n)


def _round(value: Number, digits: Number = 0) -> Number:
    # round() to a million digits would build the power of ten first.
    if not isinstance(digits, int) or abs(digits) > 100:
        raise Refused("round takes between -100 and 100 digits")
    return round(value, digits) if digits else round(value)


_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e}
_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
    "gcd": math.gcd,
    "lcm": math.lcm,
    "factorial": _factorial,
    **{
        name: getattr(math, name)
        for name in ("sqrt", "floor", "ceil", "exp", "log", "log2", "log10", "sin", "cos", "tan")
    },
}
