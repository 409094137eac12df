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
