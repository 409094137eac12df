"""Recipes: the settings that a published method prescribes, laid between a preset and what the user sets.

A recipe is a YAML file beside this one. Its first line says what it is; every value has its source beside it. What it may
set are the blocks of `BLOCKS`, `adds_rewards`: components that join the preset's, unless it has one of that name,
`adds_weights` of rewards to which nobody below gives one, `without_rewards`: those of another method, and `at_least`: numbers
of any block that the method needs and a preset may exceed.
It sets no learning rate, batch or length: those belong to the model and the machine, which are the preset's.

Its `algorithm` and `critic` replace those below whole, over the defaults: of another method nothing is left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolrl.config import Named, RunConfig
from toolrl.config_schema import normalized, overlaid
from toolrl.errors import ConfigError, Problem
from toolrl.presets.source import Source, checked, read_file
from toolrl.registry import nearest

BLOCKS = ("algorithm", "critic", "learner", "loop", "buffer", "supervision", "cold_start")
_REPLACED = ("algorithm", "critic")
_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The recipes that ship with toolrl."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def text(name: str) -> str:
    """A recipe as it is written. Raises ConfigError for an unknown name."""
    return _path(name, "").read_text(encoding="utf-8")


def description(name: str) -> str:
    """The first comment line of a recipe."""
    return text(name).partition("\n")[0].lstrip("# ").strip()


def laid_over(below: Source, name: str, defaults: dict[str, Any], *, where: str) -> Source:
    """The recipe over the settings `below`.

    Args:
        defaults: those of every key.
        where: where the recipe was asked for, for the message.

    Raises:
        ConfigError: no recipe of that name; the message holds the nearest one.
    """
    source = read_file(_path(name, where), f"recipe {name}")
    added = normalized(list[Named], source.tree.pop("adds_rewards", []))
    weights, foreign = source.tree.pop("adds_weights", {}), source.tree.pop("without_rewards", [])
    least = source.tree.pop("at_least", {})
    source = checked(_raised(source, least, below.tree))
    tree = overlaid(RunConfig, {**below.tree, **{block: defaults[block] for block in _REPLACED}}, source.tree)
    origins = {key: line for key, line in below.origins.items() if key.partition(".")[0] not in _REPLACED}
    origins.update(source.origins)
    components = [there for there in tree["rewards"]["components"] if there["name"] not in foreign]
    if len(components) < len(tree["rewards"]["components"]):  # the lines of those that are left are no longer known
        origins = {key: line for key, line in origins.items() if not key.startswith("rewards.components.")}
    for index, component in enumerate(added):
        if component["name"] not in [there["name"] for there in components]:
            origins[f"rewards.components.{len(components)}"] = source.origins[f"adds_rewards.{index}"]
            components.append(component)
    rewards = {**tree["rewards"], "components": components, "weights": {**weights, **tree["rewards"]["weights"]}}
    return Source({**tree, "rewards": rewards}, origins)


def _raised(source: Source, least: dict[str, Any], below: dict[str, Any]) -> Source:
    """The recipe with those numbers of its `at_least` that the settings below do not reach."""
    tree, origins = dict(source.tree), dict(source.origins)
    for block, wanted in least.items():
        for key, value in wanted.items():
            if below[block][key] < value:
                tree[block] = {**tree.get(block, {}), key: value}
                origins[f"{block}.{key}"] = source.origins[f"at_least.{block}.{key}"]
    return Source(tree, origins)


def _path(name: str, where: str) -> Path:
    if name not in names():
        raise ConfigError([Problem("recipe", f"unknown recipe{nearest(name, names())}", name, where=where)])
    return _FOLDER / f"{name}.yaml"
