"""Which calls of a trace do nothing for its answer, by the names that they set and read."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from dataclasses import dataclass

_BUILT_IN = frozenset(dir(builtins))


@dataclass(frozen=True)
class Names:
    """Of one program: names it takes from earlier ones, names it sets or changes, names it sets whatever they were."""

    read: frozenset[str]
    changed: frozenset[str]
    replaced: frozenset[str]


def unneeded(programs: Sequence[str]) -> list[int]:
    """Indices of programs that set nothing which a later needed one reads; the last one, which prints the answer, is needed
    if it reads anything of the others.

    Backwards through the trace, as a compiler finds dead code: a name is wanted from where it is read to where it was set.
    """
    wanted: set[str] = set()
    idle = []
    for index in range(len(programs) - 1, -1, -1):
        names = names_of(programs[index])
        last = index == len(programs) - 1
        if not last and not names.changed & wanted:
            idle.append(index)
            continue
        if last and index and not names.read:
            idle.append(index)  # it would print the same without the others
        wanted = (wanted - names.replaced) | names.read
    return sorted(idle)


def names_of(program: str) -> Names:
    """The names of a program, statement by statement. A method called on a name, or an item set in it, changes it.

    Raises:
        SyntaxError: it is no program.
    """
    read: set[str] = set()
    changed: set[str] = set()
    replaced: set[str] = set()
    for statement in ast.parse(program).body:
        walked = _Walk(statement)
        read |= walked.loaded - replaced - _BUILT_IN
        changed |= walked.stored | walked.mutated
        # What stands below a condition or a loop may not be set at all.
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom | ast.FunctionDef):
            replaced |= walked.stored
    return Names(frozenset(read), frozenset(changed), frozenset(replaced))


class _Walk:
    """The names of one statement; those that a comprehension or a function has for itself are left out."""

    def __init__(self, statement: ast.stmt) -> None:
        self.loaded: set[str] = set()
        self.stored: set[str] = set()
        self.mutated: set[str] = set()
        self._own: set[str] = set()
        for node in ast.walk(statement):
            if isinstance(node, ast.comprehension):
                self._own |= {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
            elif isinstance(node, ast.FunctionDef | ast.Lambda):
                self._own |= {argument.arg for argument in node.args.args}
        for node in ast.walk(statement):
            self._take(node)
        self.loaded -= self._own
        self.stored -= self._own

    def _take(self, node: ast.AST) -> None:
        match node:
            case ast.AugAssign(target=ast.Name(id=name)):
                self.loaded.add(name)
            case ast.Name(id=name, ctx=ast.Load()):
                self.loaded.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                self.stored.add(name)
            case ast.Attribute(value=ast.Name(id=name)) | ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                self.mutated.add(name)
            case ast.FunctionDef(name=name):
                self.stored.add(name)
            case ast.alias(name=name, asname=shown):
                self.stored.add(shown or name.partition(".")[0])
