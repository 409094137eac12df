"""Every key of a config with its type, default and the comment beside it in `toolrl.config`.

The comments are read from the source file, so that a setting is described in one place.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from toolrl import config as settings
from toolrl.config_schema import fields_of, without_none


@dataclass(frozen=True)
class Key:
    """One setting; an item of a list stands as `0`."""

    name: str
    kind: str
    default: str
    meaning: str


def all_keys(schema: Any = settings.RunConfig, prefix: str = "") -> Iterator[Key]:
    """All settings below a dataclass, in the order of the file."""
    defaults = {field.name: _default(field) for field in dataclasses.fields(schema)}
    for name, kind in fields_of(schema).items():
        full, (inner, _) = f"{prefix}{name}", without_none(kind)
        item = typing.get_args(inner)[0] if typing.get_origin(inner) is list else None
        if dataclasses.is_dataclass(inner) and inner is not settings.Named:
            yield from all_keys(inner, f"{full}.")
            continue
        yield Key(full, _words(kind), _shown(defaults[name]), _comments(schema).get(name, ""))
        if dataclasses.is_dataclass(item) and item is not settings.Named:
            yield from all_keys(item, f"{full}.0.")


def markdown() -> str:
    """The table of docs/config.md."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in all_keys():
        cells = (f"`{key.name}`", key.kind, f"`{key.default}`" if key.default else "", key.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _shown(value: Any) -> str:
    """A default as one would write it."""
    if isinstance(value, settings.Named):
        return value.name
    if isinstance(value, list):
        return f"[{', '.join(_shown(item) for item in value)}]"
    if dataclasses.is_dataclass(value):
        return str(getattr(value, "name", ""))
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return "{}" if value == {} else str(value)


def _words(kind: Any) -> str:
    kind, optional = without_none(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        words = ", ".join(map(str, args))
    elif origin is list:
        words = f"list of {_words(args[0])}"
    elif origin is dict:
        words = "block"
    elif dataclasses.is_dataclass(kind):
        words = "name (+ options)" if next(iter(fields_of(kind))) == "name" else "block"
    else:
        words = {str: "text", int: "whole number", float: "number", bool: "true/false"}.get(kind, "any")
    return f"{words} or null" if optional else words


@cache
def _comments(schema: type) -> dict[str, str]:
    """Field name -> the comment on its line or on the lines above it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(schema).splitlines():
        if comment := re.fullmatch(r"\s+# (.*)", line):
            above.append(comment.group(1))
        elif name := re.match(r"\s+(\w+): ", line):
            beside = re.search(r"  # (.*)$", line)
            found[name.group(1)] = " ".join([*above, *([beside.group(1)] if beside else [])])
            above = []
    return found
