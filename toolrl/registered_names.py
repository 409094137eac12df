"""The names under which parts are registered, read from the source files.

Importing a registry's parts may import torch or vLLM; a config is to be checked where neither is installed. So this
reads the `@….register("name")` decorators of the files instead; a test holds it equal to the registries themselves.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

_DECORATOR = re.compile(r"^@(?:[\w.]+\.)?register\(\s*[\"']([^\"']+)[\"']", re.MULTILINE)
_REASONING_GYM = re.compile(r"^(?:register_dataset\(\s*|DATASET_NAME = )[\"']([^\"']+)[\"']", re.MULTILINE)


@functools.cache
def registered(kind: str) -> frozenset[str]:
    """Names of the parts below `toolrl/<kind>`, e.g. `toolcalls` or `algorithms/policy_losses`."""
    base = Path(__file__).parent / kind
    files = sorted(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")]
    return frozenset(name for file in files for name in _DECORATOR.findall(file.read_text(encoding="utf-8")))


@functools.cache
def reasoning_gym_families() -> frozenset[str]:
    """Task families of the installed reasoning_gym; empty where it is not installed."""
    spec = importlib.util.find_spec("reasoning_gym")  # finds, does not import
    if spec is None or spec.origin is None:
        return frozenset()
    files = Path(spec.origin).parent.rglob("*.py")
    return frozenset(name for file in files for name in _REASONING_GYM.findall(file.read_text(encoding="utf-8")))
