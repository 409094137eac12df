"""The names under which parts are registered, and the options that each takes, read from the source files.

Importing a registry's parts may import torch or vLLM; a config is to be checked where neither is installed. So this
reads the `@registry.register("name")` decorators of the files instead; a test holds it equal to the registries.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Kind of part -> (folder below toolrl, the registry's name in it).
KINDS: dict[str, tuple[str, str]] = {
    "tool-call parser": ("toolcalls", "parsers"),
    "tool": ("tools", "tools"),
    "task source": ("tasks", "sources"),
    "reward": ("rewards", "rewards"),
    "advantage": ("algorithms", "advantage_registry"),
    "policy loss": ("algorithms", "policy_loss_registry"),
    "correction": ("algorithms", "correction_registry"),
    "regulariser": ("algorithms", "regularizer_registry"),
    "guard action": ("guards", "guard_actions"),
    "evaluation variant": ("variants", "variants"),
    "critic": ("supervision/reflection", "critics"),
}
_REASONING_GYM = re.compile(r"^(?:register_dataset\(\s*|DATASET_NAME = )[\"']([^\"']+)[\"']", re.MULTILINE)


# Keyword arguments of a registered function that the caller fills, not the config.
_FILLED_BY_CALLER = re.compile(r"Tensor|Sequence\[")


@functools.cache
def registered(kind: str) -> frozenset[str]:
    """Names of the parts of one of `KINDS` that ship with toolrl."""
    return frozenset(_functions(kind))


@functools.cache
def options(kind: str, name: str) -> tuple[frozenset[str], frozenset[str]] | None:
    """(options a part takes, those it cannot do without); None for a part of the user's own or one that takes any."""
    function = _functions(kind).get(name)
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.args.kwarg is not None:
        return None
    taken, required = set(), set()
    for argument, has_default, keyword_only in _arguments(function):
        annotation = ast.unparse(argument.annotation) if argument.annotation is not None else ""
        if not (has_default or keyword_only) or _FILLED_BY_CALLER.search(annotation):
            continue
        taken.add(argument.arg)
        if not has_default:
            required.add(argument.arg)
    return frozenset(taken), frozenset(required)


@functools.cache
def defaults(kind: str, name: str) -> dict[str, Any]:
    """Option -> its default, for the options of a part that have one."""
    taken, _ = options(kind, name) or (frozenset(), frozenset())
    function = _functions(kind)[name]
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    positional = [*function.args.posonlyargs, *function.args.args]
    given: list[tuple[ast.arg, ast.expr | None]] = [
        *zip(reversed(positional), reversed(function.args.defaults), strict=False),
        *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True),
    ]
    return {
        argument.arg: ast.literal_eval(default)
        for argument, default in given
        if default is not None and argument.arg in taken
    }


@functools.cache
def choices(kind: str, name: str) -> dict[str, tuple[str, ...]]:
    """Option -> the words that it may be, for the options of a part that are annotated with a `Literal` or an alias of one."""
    taken, _ = options(kind, name) or (frozenset(), frozenset())
    function = _functions(kind).get(name)
    found: dict[str, tuple[str, ...]] = {}
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        for argument, *_ in _arguments(function):
            if argument.arg in taken and argument.annotation is not None:
                words = _words(argument.annotation) or _literals(kind).get(ast.unparse(argument.annotation))
                if words:
                    found[argument.arg] = words
    return found


@functools.cache
def _literals(kind: str) -> dict[str, tuple[str, ...]]:
    """Alias -> words, for every `Alias = Literal[…]` in the files of a kind."""
    found: dict[str, tuple[str, ...]] = {}
    for file in (Path(__file__).parent / KINDS[kind][0]).rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.parse(text).body if "Literal[" in text else ():
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (words := _words(node.value)):
                found[node.targets[0].id] = words
    return found


def _words(annotation: ast.expr) -> tuple[str, ...] | None:
    """The words of `Literal["a", "b"]`; None for anything else."""
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "Literal":
        return None
    listed = ast.literal_eval(annotation.slice)
    return tuple(listed) if isinstance(listed, tuple) else (listed,)


@functools.cache
def evidence(advantage: str) -> str | None:
    """What an advantage needs from the learner: `values` (a critic) or `teacher` (the policy given the answer); None:
    nothing, or an advantage of the user's own. Read from `@needs("…")`."""
    for decorator in getattr(_functions("advantage").get(advantage), "decorator_list", ()):
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "needs":
            needed: str = ast.literal_eval(decorator.args[0])
            return needed
    return None


@functools.cache
def stage(reward: str) -> str:
    """When a reward is scored: at the `episode`'s end, or with its `group` or by the `learner`. Read from
    `@scored_at("…")`; a reward of the user's own counts as one of the episode."""
    for decorator in getattr(_functions("reward").get(reward), "decorator_list", ()):
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "scored_at":
            scored: str = ast.literal_eval(decorator.args[0])
            return scored
    return "episode"


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[ast.arg, bool, bool]]:
    """(argument, whether it has a default, whether it is keyword-only)."""
    positional = [*function.args.posonlyargs, *function.args.args]
    first_default = len(positional) - len(function.args.defaults)
    for index, argument in enumerate(positional):
        yield argument, index >= first_default, False
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        yield argument, default is not None, True


@functools.cache
def _functions(kind: str) -> dict[str, ast.stmt]:
    """Registered name -> the function or class under the decorator."""
    folder, registry = KINDS[kind]
    found: dict[str, ast.stmt] = {}
    for file in (Path(__file__).parent / folder).rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if f"@{registry}.register(" not in text:
            continue
        for node in ast.parse(text).body:
            for decorator in getattr(node, "decorator_list", ()):
                if ast.unparse(decorator).startswith(f"{registry}.register(") and isinstance(decorator, ast.Call):
                    found[ast.literal_eval(decorator.args[0])] = node
    return found


@functools.cache
def reasoning_gym_families() -> frozenset[str]:
    """Task families of the installed reasoning_gym; empty where it is not installed."""
    spec = importlib.util.find_spec("reasoning_gym")  # finds, does not import
    if spec is None or spec.origin is None:
        return frozenset()
    files = Path(spec.origin).parent.rglob("*.py")
    return frozenset(name for file in files for name in _REASONING_GYM.findall(file.read_text(encoding="utf-8")))
