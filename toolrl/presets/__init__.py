"""Settings of a run from a preset or a YAML file, a recipe and `key=value` overrides, and the ready-made presets.

A file may start from a preset or another file with `base: NAME_OR_FILE`; it then lists only what differs. One recipe
(`toolrl.presets.recipes`) is in force: the one on the command line lies over all files, else the topmost file's that
names one lies just below that file's own settings. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toolrl import config_checks
from toolrl.config import RunConfig
from toolrl.config_schema import built, overlaid
from toolrl.errors import ConfigError, Problem
from toolrl.presets import recipes
from toolrl.presets.source import COMMAND_LINE, Source, apply_overrides, checked, override_of, read_file
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
    source = _resolved(_chain(preset_or_file, ()), _defaults(), overrides)
    config: RunConfig = built(RunConfig, _without_interpolations(source))
    found = [replace(problem, where=source.origin(problem.key)) for problem in config_checks.problems(config)]
    if errors := [problem for problem in found if not problem.warning]:
        raise ConfigError(errors)
    return config, [problem for problem in found if problem.warning]


def to_yaml(config: RunConfig) -> str:
    """The whole config as YAML that `load` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


@cache
def _defaults() -> dict[str, Any]:
    return asdict(RunConfig())


def _without_interpolations(source: Source) -> dict[str, Any]:
    """The tree with every `${…}` resolved. Raises ConfigError for one that does not resolve, or to a wrong type."""
    if "${" not in repr(source.tree):
        return source.tree  # OmegaConf takes 40 ms for a tree of this size
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), source.tree)
        resolved: Any = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", "") or "")
        message = str(error).partition("\n")[0]
        raise ConfigError([Problem(key, message, has_value=False, where=source.origin(key))]) from error
    tree: dict[str, Any] = resolved
    return tree


def _locate(preset_or_file: str) -> tuple[Path, str]:
    """The file behind a preset's name or a path, and what to call it in messages."""
    if preset_or_file in names():
        return _FOLDER / f"{preset_or_file}.yaml", f"preset {preset_or_file}"
    path = Path(preset_or_file)
    if path.is_file():
        return path, str(path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise ConfigError([Problem("", f"no such file: {preset_or_file}; presets: {', '.join(names())}")])
    if preset_or_file in recipes.names():
        message = f"{preset_or_file} is a recipe: lay it over a preset, e.g. quickstart-cpu recipe={preset_or_file}"
        raise ConfigError([Problem("", message)])
    raise ConfigError([Problem("", f"unknown preset {preset_or_file!r}{nearest(preset_or_file, names())}")])


def _resolved(files: Sequence[Source], defaults: dict[str, Any], overrides: Sequence[str]) -> Source:
    """Defaults, files (lowest first), the recipe where it belongs, overrides."""
    on_command_line, asked = override_of("recipe", overrides)
    top = None if on_command_line else next((file for file in reversed(files) if "recipe" in file.tree), None)
    source = Source(defaults)
    for file in files:
        if file is top and file.tree["recipe"] is not None:
            source = recipes.laid_over(source, str(file.tree["recipe"]), defaults, where=file.origin("recipe"))
        # A key written again takes the lines of everything below it with it: its list was replaced whole.
        kept = {key: line for key, line in source.origins.items() if key.rpartition(".")[0] not in file.origins}
        source = Source(overlaid(RunConfig, source.tree, file.tree), {**kept, **file.origins})
    if isinstance(asked, str):
        source = recipes.laid_over(source, asked, defaults, where=COMMAND_LINE)
    return apply_overrides(source, overrides)


def _chain(preset_or_file: str, seen: tuple[Path, ...]) -> list[Source]:
    """The file and the bases below it, lowest first."""
    path, label = _locate(preset_or_file)
    if path.resolve() in seen:
        raise ConfigError(
            [Problem("base", "the files name each other as base in a circle", preset_or_file, where=label)]
        )
    source = read_file(path, label)
    base = source.tree.get("base")
    source = Source({key: value for key, value in source.tree.items() if key != "base"}, source.origins)
    below: list[Source] = []
    if base is not None:
        beside = path.parent / str(base)
        below = _chain(str(beside) if beside.is_file() else str(base), (*seen, path.resolve()))
    return [*below, checked(source)]
