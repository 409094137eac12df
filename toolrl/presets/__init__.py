"""Settings of a run from a preset or a YAML file plus `key=value` overrides, and the ready-made presets.

A file may start from a preset or another file with `base: NAME_OR_FILE`; it then lists only what differs. Nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toolrl import config_checks
from toolrl.config import RunConfig
from toolrl.config_schema import overlaid
from toolrl.errors import ConfigError, Problem
from toolrl.presets.source import Source, apply_overrides, checked, read_file
from toolrl.registry import nearest

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The presets that ship with toolrl."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def description(name: str) -> str:
    """The first comment line of a preset."""
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").strip()


def text(name: str) -> str:
    """A preset as it is written. Raises ConfigError for an unknown name."""
    return _locate(name)[0].read_text(encoding="utf-8")


def load(preset_or_file: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked settings. `preset_or_file` is a preset's name or the path of a YAML file.

    Raises:
        ConfigError: unknown names or keys, wrong types, impossible combinations: all of them, with file and line.
    """
    return load_with_warnings(preset_or_file, overrides)[0]


def load_with_warnings(preset_or_file: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, list[Problem]]:
    """`load`, and what is odd about the settings without being impossible."""
    defaults = OmegaConf.to_container(_schema())
    assert isinstance(defaults, dict)
    source = _read(preset_or_file, Source({str(key): value for key, value in defaults.items()}), ())
    source = apply_overrides(source, overrides)
    try:
        merged = OmegaConf.merge(_schema(), source.tree)
        config: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:  # an interpolation that does not resolve, or resolves to a wrong type
        key = str(getattr(error, "full_key", "") or "")
        message = str(error).partition("\n")[0]
        raise ConfigError([Problem(key, message, has_value=False, where=source.origin(key))]) from error
    assert isinstance(config, RunConfig)
    found = [replace(problem, where=source.origin(problem.key)) for problem in config_checks.problems(config)]
    if errors := [problem for problem in found if not problem.warning]:
        raise ConfigError(errors)
    return config, [problem for problem in found if problem.warning]


def to_yaml(config: RunConfig) -> str:
    """The whole config as YAML that `load` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


@cache
def _schema() -> Any:
    """The dataclasses as OmegaConf reads them, which takes a tenth of a second. `merge` copies it."""
    return OmegaConf.structured(RunConfig)


def _locate(preset_or_file: str) -> tuple[Path, str]:
    """The file behind a preset's name or a path, and what to call it in messages."""
    if preset_or_file in names():
        return _FOLDER / f"{preset_or_file}.yaml", f"preset {preset_or_file}"
    path = Path(preset_or_file)
    if path.is_file():
        return path, str(path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise ConfigError([Problem("", f"no such file: {preset_or_file}; presets: {', '.join(names())}")])
    raise ConfigError([Problem("", f"unknown preset {preset_or_file!r}{nearest(preset_or_file, names())}")])


def _read(preset_or_file: str, below: Source, seen: tuple[Path, ...]) -> Source:
    """The file over its base over `below`."""
    path, label = _locate(preset_or_file)
    if path.resolve() in seen:
        raise ConfigError(
            [Problem("base", "the files name each other as base in a circle", preset_or_file, where=label)]
        )
    source = read_file(path, label)
    base = source.tree.pop("base", None)
    if base is not None:
        beside = path.parent / str(base)
        below = _read(str(beside) if beside.is_file() else str(base), below, (*seen, path.resolve()))
    source = checked(source)
    tree = overlaid(RunConfig, below.tree, source.tree)
    # A key written again takes the lines of everything below it with it: its list was replaced whole.
    kept = {key: line for key, line in below.origins.items() if key.rpartition(".")[0] not in source.origins}
    return Source(tree, {**kept, **source.origins})
