"""What a config may hold, read off the dataclasses of `toolrl.config`: keys, types, how one tree overlays another.

Trees are plain dicts, lists and scalars. Every fault of a tree is found, with its full key, so that a user mends a
file in one go. `Named("ctpo")` (every dataclass whose first field is `name`) may be written as the bare string `ctpo`.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union

from toolrl.config import Named, RunConfig
from toolrl.errors import Problem

Path = tuple[str | int, ...]


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def fields_of(schema: Any) -> dict[str, Any]:
    """Field name -> type of a dataclass."""
    return _fields_of(schema)


@functools.cache
def _fields_of(schema: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


def without_none(schema: Any) -> tuple[Any, bool]:
    """(X, True) for Optional[X], else (schema, False)."""
    if typing.get_origin(schema) in (Union, types.UnionType):
        inner = [arg for arg in typing.get_args(schema) if arg is not type(None)]
        return inner[0], len(inner) < len(typing.get_args(schema))
    return schema, False


def schema_at(path: Path) -> Any:
    """The type at a path, or None when no such key can exist."""
    schema: Any = RunConfig
    for part in path:
        schema = child(schema, part)
        if schema is None:
            return None
    return schema


def child(schema: Any, part: str | int) -> Any:
    """The type one step below `schema`, or None."""
    schema, _ = without_none(schema)
    origin, args = typing.get_origin(schema), typing.get_args(schema)
    if dataclasses.is_dataclass(schema):
        return fields_of(schema).get(str(part))
    if origin is list:
        return args[0] if str(part).isdigit() else None
    if origin is dict:
        return args[1]
    return Any if schema is Any else None


def known_keys(schema: Any = RunConfig, prefix: Path = ()) -> Iterator[str]:
    """Every full key; an item of a list stands as `0`."""
    schema, _ = without_none(schema)
    if dataclasses.is_dataclass(schema):
        for name, inner in fields_of(schema).items():
            yield dotted((*prefix, name))
            yield from known_keys(inner, (*prefix, name))
    elif typing.get_origin(schema) is list:
        yield from known_keys(typing.get_args(schema)[0], (*prefix, 0))


def nearest_key(path: Path) -> str:
    """`; did you mean 'loop.steps'?` for an unknown key: a sibling, the same leaf elsewhere, or the closest key."""
    parent, leaf, known = dotted(path[:-1]), str(path[-1]), list(known_keys())
    siblings = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == _with_zeros(path[:-1])]
    if close := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6):
        return f"; did you mean {'.'.join(p for p in (parent, close[0]) if p)!r}?"
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    close = difflib.get_close_matches(dotted(path), same_leaf or known, n=1, cutoff=0.0 if same_leaf else 0.6)
    if not close and (
        leaves := difflib.get_close_matches(leaf, [k.rpartition(".")[2] for k in known], n=1, cutoff=0.75)
    ):
        close = [key for key in known if key.rpartition(".")[2] == leaves[0]][:1]
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known here: {', '.join(siblings)}" if siblings else "; `toolrl config keys` lists every key"


def _with_zeros(path: Path) -> str:
    return dotted(tuple(0 if str(part).isdigit() else part for part in path))


def normalized(schema: Any, value: Any) -> Any:
    """`value` with bare names spelled out: `ctpo` -> {name: ctpo} where the schema is a dataclass led by `name`."""
    schema, _ = without_none(schema)
    if dataclasses.is_dataclass(schema):
        inner = fields_of(schema)
        if isinstance(value, str) and next(iter(inner)) == "name" and schema is not RunConfig:
            return {"name": value}
        if isinstance(value, dict):
            return {key: normalized(inner[key], item) if key in inner else item for key, item in value.items()}
    elif typing.get_origin(schema) is list and isinstance(value, list):
        return [normalized(typing.get_args(schema)[0], item) for item in value]
    return value


def faults(schema: Any, value: Any, path: Path = ()) -> Iterator[tuple[Path, Problem]]:
    """Unknown keys and wrong types of a normalised tree, each with its path."""
    schema, optional = without_none(schema)
    origin, args = typing.get_origin(schema), typing.get_args(schema)
    if schema is Any or (value is None and optional):
        return
    if dataclasses.is_dataclass(schema) or origin is dict:
        if not isinstance(value, dict):
            yield path, Problem(dotted(path), "must be a block of `key: value` lines" + _example(schema), value)
            return
        for key, item in value.items():
            inner = child(schema, str(key))
            if inner is None:
                here = (*path, str(key))
                yield here, Problem(dotted(here), f"unknown key{nearest_key(here)}", has_value=False)
            else:
                yield from faults(inner, item, (*path, str(key)))
    elif origin is list:
        if not isinstance(value, list):
            yield path, Problem(dotted(path), "must be a list, e.g. [a, b]", value)
            return
        for index, item in enumerate(value):
            yield from faults(args[0], item, (*path, index))
    elif problem := _wrong_scalar(schema, value):
        yield path, Problem(dotted(path), problem, value)


def _example(schema: Any) -> str:
    return f" with the keys {', '.join(fields_of(schema))}" if dataclasses.is_dataclass(schema) else ""


def _wrong_scalar(schema: Any, value: Any) -> str | None:
    """What is wrong with a scalar of this type, or None."""
    if isinstance(value, str) and "${" in value:
        return None  # an interpolation: checked when it is resolved
    if typing.get_origin(schema) is Literal:
        choices = typing.get_args(schema)
        if value in choices and not isinstance(value, bool):
            return None
        close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"must be one of {', '.join(map(str, choices))}{hint}"
    allowed, words = {
        int: ((int,), "a whole number"),
        float: ((int, float), "a number"),
        bool: ((bool,), "true or false"),
        str: ((str, int, float), "a text"),
    }[schema]
    if not isinstance(value, allowed) or (isinstance(value, bool) and schema is not bool):
        return f"must be {words}, not {_kind(value)}"
    return None


def _kind(value: Any) -> str:
    names = {
        str: "a text",
        bool: "true/false",
        int: "a whole number",
        float: "a fraction",
        dict: "a block",
        list: "a list",
    }
    return names.get(type(value), "empty")


def overlaid(schema: Any, base: Any, new: Any) -> Any:
    """`new` over `base`, both normalised and without faults.

    Lists are replaced whole, and another name drops the old name's options.
    """
    schema, _ = without_none(schema)
    if not isinstance(base, dict) or not isinstance(new, dict):
        return new
    if schema is Named and new.get("name", base.get("name")) != base.get("name"):
        return new
    return {**base, **{key: overlaid(child(schema, str(key)), base.get(key), item) for key, item in new.items()}}


def built(schema: Any, tree: Any) -> Any:
    """What a complete tree (normalised, without faults or interpolations) describes; shares nothing with the tree."""
    schema, _ = without_none(schema)
    origin, args = typing.get_origin(schema), typing.get_args(schema)
    if tree is None or schema is Any:
        return copy.deepcopy(tree)
    if dataclasses.is_dataclass(schema):
        inner = fields_of(schema)
        assert isinstance(schema, type)
        return schema(**{name: built(inner[name], value) for name, value in tree.items()})
    if origin is list:
        return [built(args[0], item) for item in tree]
    if origin is dict:
        return {key: built(args[1], item) for key, item in tree.items()}
    return schema(tree) if schema in (float, str) else tree
