"""The tool of `toolrl bench trl` on both sides: one schema, that which TRL shows for a function.

`in_process` is TRL's side; `python` is ours, as an import path in the run's settings.
"""

from __future__ import annotations

import ast
import contextlib
import io
import random
from collections.abc import Callable
from typing import Any

# As transformers' `get_json_schema` reads it off the function of `in_process`.
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "Python code"}},
            "required": ["code"],
        },
        "return": {"type": "string"},
    },
}
# What toolrl's tools say when they fail on purpose: the common start has seen these.
FAILURES = (
    "Error: python busy, try again",
    "Error: connection to python was reset, try again",
    "Error: python is temporarily unavailable (503), try again",
)
_ALLOWED = (
    *(ast.Module, ast.Expr, ast.Call, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.Constant),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub, ast.UAdd),
)


def python(config: Any, interpreter: Any) -> Any:
    """toolrl's `python` in its sandbox, but for what the model is told about it."""
    from toolrl.tools.python import python as sandboxed

    tool = sandboxed(config, interpreter)
    tool.schema = SCHEMA
    return tool


def in_process(failures: float, seed: int) -> Callable[[str], str]:
    """The tool as TRL wants it: a function, whose schema is read off it; this share of calls fails."""
    draw = random.Random(seed)

    def python(code: str) -> str:
        """Run Python code.

        Args:
            code: Python code
        """
        return draw.choice(FAILURES) if draw.random() < failures else computed(code)

    return python


def computed(code: str) -> str:
    """What a program of sums and `print` prints. Others are refused: what a model wrote runs here without a sandbox."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return "SyntaxError: invalid syntax"
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    texts = any(isinstance(node, ast.Constant) and not isinstance(node.value, int | float) for node in nodes)
    if texts or not all(isinstance(node, _ALLOWED) for node in nodes) or names - {"print"}:
        return f"NameError: name '{min(names - {'print'}, default='x')}' is not defined"
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, "<cell>", "exec"), {"__builtins__": {"print": print}})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return printed.getvalue().rstrip("\n") or "(no output)"
