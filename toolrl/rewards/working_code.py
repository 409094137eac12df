"""What of an episode's code did something: for likeness to others' code, and for which call needed which.

Imports, comments, docstrings, definitions that nothing uses and printed literals are in every solution and prove
nothing: whoever copies them has solved nothing. The rest is what works.
"""

from __future__ import annotations

import ast
import builtins
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_FILE = "<model code>"
# What a parser finds odd in the model's code is no message for the run's screen.
for _kind in (SyntaxWarning, DeprecationWarning):
    warnings.filterwarnings("ignore", category=_kind, module=_FILE)
_BUILT_IN = frozenset(dir(builtins))
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class Names:
    """Of a piece of code: the names that it leaves behind, and those that it takes from before."""

    bound: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()


def names_of(code: Any) -> Names:
    """The names of a call's code; none for what is not Python."""
    body = _parsed(code)
    bound: set[str] = set()
    read: set[str] = set()
    for statement in body or ():
        names = _names(statement)
        read |= names.read - bound
        bound |= names.bound
    return Names(frozenset(bound), frozenset(read))


def working_code(cells: Sequence[str]) -> str:
    """The statements of one session's cells that have a part in what it shows, in a normal form.

    A statement works when it is evaluated for what it shows or does, or binds a name that a later one which works reads.
    Code that is not Python is taken as it is. What was run twice is there once.
    """
    found: list[str] = []
    needed: set[str] = set()
    for cell in reversed(list(dict.fromkeys(cells))):
        body = _parsed(cell)
        if body is None:
            found.append(cell)
            continue
        for statement in reversed(body):
            names = _names(statement)
            if _is_boilerplate(statement) or not (names.bound & needed or _acts(statement)):
                continue
            needed = (needed - names.bound) | names.read
            found.append(_normal(statement, cell))
    return "\n".join(reversed(found))


def _parsed(code: Any) -> list[ast.stmt] | None:
    """The statements; None for what is no Python. Only code that an interpreter has run comes here, so none that is made to
    overrun a parser."""
    if not isinstance(code, str):
        return None
    try:
        return ast.parse(code, filename=_FILE).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _names(statement: ast.stmt) -> Names:
    """Names that one statement binds and reads; those of a loop or of a function's inside are read from nowhere else."""
    bound: set[str] = set()
    read: set[str] = set()
    local: set[str] = set()
    is_definition = isinstance(statement, _DEFINITIONS)
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name):
                (local if is_definition else bound).add(name)
            case ast.AugAssign(target=ast.Name(id=name)):
                read.add(name)
            case ast.arg(arg=name):
                local.add(name)
            case ast.For(target=target) | ast.AsyncFor(target=target) | ast.comprehension(target=target):
                local |= {inner.id for inner in ast.walk(target) if isinstance(inner, ast.Name)}
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases) if not is_definition:
                bound |= {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
    if isinstance(statement, _DEFINITIONS):
        bound.add(statement.name)
    return Names(frozenset(bound), frozenset(read - local - _BUILT_IN))


def _is_boilerplate(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass):
        return True
    return isinstance(statement, ast.Expr) and _is_literal(statement.value)


def _is_literal(shown: ast.expr) -> bool:
    """A literal, or a `print` of literals alone: what it shows was known when it was written."""
    if isinstance(shown, ast.Call) and isinstance(shown.func, ast.Name) and shown.func.id == "print":
        return all(_is_literal(argument) for argument in shown.args)
    if isinstance(shown, ast.JoinedStr):
        return all(isinstance(part, ast.Constant) for part in shown.values)
    try:
        ast.literal_eval(shown)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _acts(statement: ast.stmt) -> bool:
    """Whether it shows or does something by itself: an expression, or a block that holds one."""
    if isinstance(statement, ast.Expr | ast.Assert | ast.Raise | ast.Delete):
        return True
    if isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try | ast.Match):
        return any(isinstance(node, ast.Expr) and not _is_literal(node.value) for node in ast.walk(statement))
    return False


def _normal(statement: ast.stmt, cell: str) -> str:
    """Without comments, docstrings and habits of spacing; as it stands where it is nested too deeply for that."""
    for node in ast.walk(statement):
        if isinstance(node, _DEFINITIONS) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    try:
        return ast.unparse(statement)
    except RecursionError:
        return ast.get_source_segment(cell, statement) or cell
