"""Runs one cell the way a notebook does: last expression echoed, traceback trimmed to the user's frames, `await` at
top level.

Whatever the cell raises, `run` returns: only a process that dies takes the answer with it. Names of builtins and of
the standard library are bound here at import, so that a cell that replaces them harms itself only.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import traceback
import types
from builtins import isinstance, len, repr, type  # noqa: UP029  ours, whatever a cell makes of the module's
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import asyncio

_compile, _eval = compile, eval
_parse, _Expr, _Expression = ast.parse, ast.Expr, ast.Expression
_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_CO_COROUTINE = 0x80
_TracebackException = traceback.TracebackException


class CellOutcome(NamedTuple):
    """`exit_code` is None unless the cell raised SystemExit with an integer; `error` is empty when it ended well."""

    value: str
    error: str
    exit_code: int | None


def clip(text: str, limit: int) -> str:
    """`text` with its middle cut away where it is longer than `limit` characters, and a note of how much."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters omitted ...]\n{text[-half:]}"


class CellRunner:
    """Cells of one episode, in one namespace. `limit` bounds the echoed value and the error text, in characters."""

    def __init__(self, namespace: dict[str, Any], limit: int) -> None:
        self._namespace = namespace
        self._limit = limit
        self._count = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, source: str) -> CellOutcome:
        """Run `source`. Never raises."""
        self._count += 1
        name = f"<cell {self._count}>"
        # The traceback module finds the cell's lines here; a file of that name does not exist.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        try:
            value = self._evaluate(source, name)
            shown = "" if value is None or source.rstrip().endswith(";") else clip(repr(value), self._limit)
        except BaseException as error:
            return CellOutcome("", clip(_describe(error), self._limit), _exit_code(error))
        if value is not None:
            self._namespace["_"] = value
        return CellOutcome(shown, "", None)

    def _evaluate(self, source: str, name: str) -> Any:
        tree = _parse(source, name, "exec")
        last = tree.body[-1] if tree.body else None
        if isinstance(last, _Expr):
            tree.body.pop()
        if tree.body:
            self._execute(_compile(tree, name, "exec", _FLAGS, True))
        if not isinstance(last, _Expr):
            return None
        return self._execute(_compile(_Expression(last.value), name, "eval", _FLAGS, True))

    def _execute(self, code: types.CodeType) -> Any:
        result = _eval(code, self._namespace)
        if not code.co_flags & _CO_COROUTINE:
            return result
        # Few cells await, and it would be a third of what a new box imports.
        import asyncio

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(result)


def _exit_code(error: BaseException) -> int | None:
    try:
        if not isinstance(error, SystemExit):
            return None
        code = error.code
        if code is None:
            return 0
        return code if type(code) is int and -255 <= code <= 255 else 1
    except BaseException:
        return 1


def _describe(error: BaseException) -> str:
    """The traceback without our own frames. Survives exceptions whose text raises."""
    try:
        frames = error.__traceback__
        while frames is not None and not frames.tb_frame.f_code.co_filename.startswith("<cell "):
            frames = frames.tb_next
        described = _TracebackException(type(error), error, frames, limit=-20, compact=True)
        return "".join(described.format())
    except BaseException as problem:
        return f"{type(error).__name__} (its text could not be made: {type(problem).__name__})\n"


def new_main_module() -> types.ModuleType:
    """An empty `__main__`, so that pickling and multiprocessing find what a cell defines."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    return module
