"""The names under which parts are registered, read from the source files.

Importing a registry's parts may import torch or vLLM; a config is to be checked where neither is installed. So this
reads the `@registry.register("name")` decorators of the files instead; a test holds it equal to the registries.
"""

from __future__ import annotations

import functools
import importlib.util
import re
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


@functools.cache
def registered(kind: str) -> frozenset[str]:
    """Names of the parts of one of `KINDS` that ship with toolrl."""
    folder, registry = KINDS[kind]
    decorator = re.compile(rf"^@{registry}\.register\(\s*[\"']([^\"']+)[\"']", re.MULTILINE)
    return _found_in((Path(__file__).parent / folder), decorator)


@functools.cache
def reasoning_gym_families() -> frozenset[str]:
    """Task families of the installed reasoning_gym; empty where it is not installed."""
    spec = importlib.util.find_spec("reasoning_gym")  # finds, does not import
    return frozenset() if spec is None or spec.origin is None else _found_in(Path(spec.origin).parent, _REASONING_GYM)


def _found_in(folder: Path, pattern: re.Pattern[str]) -> frozenset[str]:
    files = folder.rglob("*.py")
    return frozenset(name for file in files for name in pattern.findall(file.read_text(encoding="utf-8")))
