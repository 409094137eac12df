"""Where settings are written: YAML files with the line of every key, and `key=value` overrides of the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any

import yaml
from omegaconf import OmegaConf

from toolrl.config import RunConfig
from toolrl.config_schema import Path, dotted, faults, nearest_key, normalized, overlaid, schema_at, without_none
from toolrl.errors import ConfigError, Problem

COMMAND_LINE = "command line"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may come without libyaml, which is ten times as fast


@dataclass
class Source:
    """A tree of values and where each was written."""

    tree: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict)  # dotted key -> "run.yaml:12"

    def origin(self, key: str) -> str:
        """Where a key was written, or the closest block above it that was; "" for a default."""
        while key:
            if key in self.origins:
                return self.origins[key]
            key = key.rpartition(".")[0]
        return ""


def read_file(path: FilePath, label: str) -> Source:
    """A YAML file's tree, unchecked. Raises ConfigError for what is no YAML mapping."""
    try:
        loaded, lines = _read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("", f"cannot be read: {error}", where=str(path))]) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{label}:{mark.line + 1}" if mark else label
        raise ConfigError([Problem("", f"not valid YAML: {getattr(error, 'problem', error)}", where=where)]) from error
    if not isinstance(loaded, dict):
        raise ConfigError([Problem("", "must hold `key: value` lines, e.g. `name: my-run`", where=f"{label}:1")])
    origins = {dotted(key): f"{label}:{line}" for key, line in lines}
    return Source({str(key): value for key, value in loaded.items()}, origins)


@lru_cache(maxsize=64)
def _read_yaml(text: str) -> tuple[Any, list[tuple[Path, int]]]:
    """(what it holds, the line of each key); None for what is no mapping. Kept, so not to be changed."""
    node = yaml.compose(text, Loader=_LOADER)
    # OmegaConf's loader, unlike YAML's own, reads 1e-4 as a number and refuses a key that stands twice.
    loaded: Any = {} if node is None else None
    if isinstance(node, yaml.MappingNode):
        loaded = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return loaded, _lines(node, ())


def _lines(node: yaml.Node | None, path: Path) -> list[tuple[Path, int]]:
    found: list[tuple[Path, int]] = []
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            found.append(((*path, key.value), key.start_mark.line + 1))
            found.extend(_lines(value, (*path, key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            found.append(((*path, index), value.start_mark.line + 1))
            found.extend(_lines(value, (*path, index)))
    return found


def checked(source: Source) -> Source:
    """The source with names spelled out. Raises ConfigError with every unknown key and wrong type."""
    tree = normalized(RunConfig, source.tree)
    problems = [
        Problem(p.key, p.message, p.value, p.has_value, source.origin(dotted(path)))
        for path, p in faults(RunConfig, tree)
    ]
    if problems:
        raise ConfigError(problems)
    return Source(tree, source.origins)


def apply_overrides(source: Source, overrides: Sequence[str]) -> Source:
    """`key=value` settings over a complete tree. `tools.0.timeout_s=2` reaches into lists; the next index appends."""
    tree, origins, problems = source.tree, dict(source.origins), []
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key.strip():
            message = f"{text!r} is no setting; write key=value, e.g. loop.steps=20"
            problems.append(Problem("", message, where=COMMAND_LINE))
            continue
        path = tuple(
            int(part) if part.isdecimal() else part for part in re.split(r"[.\[]", key.strip().replace("]", ""))
        )
        try:
            value = _parsed(text)
            tree = _with(tree, path, value)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        origins = {k: v for k, v in origins.items() if not k.startswith(dotted(path) + ".")}
        origins[dotted(path)] = COMMAND_LINE
        for depth, part in enumerate(path):
            if isinstance(part, int):  # an item that no file wrote was made here
                origins.setdefault(dotted(path[: depth + 1]), COMMAND_LINE)
    if problems:
        raise ConfigError(problems)
    return Source(tree, origins)


def override_of(key: str, overrides: Sequence[str]) -> tuple[bool, Any]:
    """(whether a top-level key is overridden, with which value): the last one wins. Raises ConfigError."""
    written = [text for text in overrides if text.partition("=")[0].strip() == key and "=" in text]
    return (True, _parsed(written[-1])) if written else (False, None)


def _parsed(text: str) -> Any:
    key, _, written = text.partition("=")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={written}"]), resolve=False)
    except (yaml.YAMLError, ValueError) as error:
        message = f"cannot be read as a value: {error}; quote it, e.g. '{key}=\"…\"'"
        raise ConfigError([Problem(key, message, written, where=COMMAND_LINE)]) from error
    assert isinstance(value, dict)
    return value["value"]


def _with(tree: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """A copy of the tree with one value set. Raises ConfigError."""
    schema = schema_at(path)
    if schema is None:
        message = f"unknown key{nearest_key(path)}"
        raise ConfigError([Problem(dotted(path), message, has_value=False, where=COMMAND_LINE)])
    value = normalized(schema, value)
    problems = [Problem(p.key, p.message, p.value, p.has_value, COMMAND_LINE) for _, p in faults(schema, value, path)]
    if problems:
        raise ConfigError(problems)
    result: dict[str, Any] = _set(tree, path, (), value)
    return result


def _set(node: Any, rest: Path, done: Path, value: Any) -> Any:
    if not rest:
        # A block given on the command line overlays (a new name drops the old options); anything else replaces.
        return overlaid(schema_at(done), node, value) if isinstance(node, dict) else value
    head, tail = rest[0], rest[1:]
    if isinstance(node, list):
        assert isinstance(head, int)  # schema_at admitted it
        if head > len(node):
            message = f"there are only {len(node)} items; the next is {dotted((*done, len(node)))}"
            raise ConfigError([Problem(dotted((*done, head)), message, has_value=False, where=COMMAND_LINE)])
        item = _set(node[head] if head < len(node) else None, tail, (*done, head), value)
        return [*node[:head], item, *node[head + 1 :]]
    if node is None:  # an optional block that is off, or a new item: starts empty
        node = {}
    if not isinstance(node, dict):
        message = f"{dotted(done)} is {node!r}, which has no keys below it"
        raise ConfigError([Problem(dotted((*done, *rest)), message, has_value=False, where=COMMAND_LINE)])
    below = _set(node.get(str(head)), tail, (*done, head), value)
    changed = {**node, str(head): below}
    # `algorithm.policy_loss.name=token` leaves the options of the former loss behind.
    schema, _ = without_none(schema_at(done))
    return overlaid(schema, node, {"name": below}) if head == "name" and done and not tail else changed
