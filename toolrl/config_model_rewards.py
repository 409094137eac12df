"""Rewards that need a model (`prm`, `monte_carlo`, `masked_result`, `attention_mass`): their options in effect, and what of
them cannot work. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from toolrl import registered_names
from toolrl.config import RewardConfig, RunConfig
from toolrl.errors import Problem

LATE = ("prm", "monte_carlo")  # delivered after the episode
MEASURED = ("masked_result", "attention_mass")  # asked of the learner before advantages

# Option: lowest, highest, whether the lowest is excluded, whether it must be whole, in words.
_NUMBERS: dict[str, tuple[float, float, bool, bool, str]] = {
    "share": (0, 1, True, False, "above 0 and at most 1: a share of the groups"),
    "continuations": (1, math.inf, False, True, "a whole number, at least 1"),
    "boundaries": (1, math.inf, False, True, "a whole number, at least 1"),
    "concurrency": (1, math.inf, False, True, "a whole number, at least 1"),
    "batch_size": (1, math.inf, False, True, "a whole number, at least 1"),
    "workers": (1, math.inf, False, True, "a whole number, at least 1"),
    "cpu_threads": (1, math.inf, False, True, "a whole number, at least 1"),
    "gpus": (0, math.inf, True, False, "above 0"),
    "full_nats": (0, math.inf, True, False, "above 0"),
    "layer": (-math.inf, math.inf, False, True, "a whole number; negative ones count from the last layer"),
    "label": (-math.inf, math.inf, False, True, "a whole number; negative ones count from the last label"),
}


def options_in_effect(config: RewardConfig, reward: str) -> dict[str, Any] | None:
    """All options of a built-in component, those of the config over its defaults; None where the config does not name it."""
    for part in config.components:
        if part.name == reward:
            return {**registered_names.defaults("reward", reward), **part.options}
    return None


def credits_turns(config: RunConfig) -> bool:
    """Whether turns earn credit of their own that an advantage gives to them alone, so that a group whose members earned the
    same in sum teaches nevertheless. (`gtpo` that is normalised by first returns has no scale for such a group.)"""
    found = (options_in_effect(config.rewards, name) for name in LATE)
    advantage = config.algorithm.advantage
    by_turn = advantage.name in ("gtpo", "steppo", "lambda_return")
    return (
        by_turn
        and advantage.options.get("normalize") != "first_return"
        and any(options is not None and options["per"] == "turn" for options in found)
    )


def _named(config: RunConfig, *rewards: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(key of the component, its name, its options as they are in the config)."""
    for index, part in enumerate(config.rewards.components):
        if part.name in rewards:
            yield f"rewards.components.{index}", part.name, dict(part.options)


def numbers(config: RunConfig) -> Iterator[Problem]:
    for key, _, options in _named(config, *LATE, *MEASURED):
        for option, value in options.items():
            if option not in _NUMBERS:
                continue
            low, high, above, whole, words = _NUMBERS[option]
            right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not right or not low <= value <= high or (above and value == low):
                yield Problem(f"{key}.options.{option}", f"must be {words}", value)


def process_reward_model(config: RunConfig) -> Iterator[Problem]:
    for key, _, options in _named(config, "prm"):
        model = str(options.get("model", ""))
        if model and ":" not in model and not (Path(model) / "config.json").is_file():
            message = (
                "is no folder in Hugging Face format (there is no config.json), and no import path module:function"
            )
            yield Problem(f"{key}.options.model", message, model)
        if options.get("device") == "cuda" and config.placement.device == "cpu":
            yield Problem(f"{key}.options.device", "placement.device is cpu: set cpu here too", "cuda")


def something_to_look_at(config: RunConfig) -> Iterator[Problem]:
    """Steps to go on from, and results that can be used, exist only with tools."""
    if config.tools and config.rollout.max_calls > 0 and config.rollout.max_turns > 1:
        return
    for key, name, _ in _named(config, "monte_carlo", *MEASURED):
        message = f"{name} looks at what follows a tool's result, and no tool can be called; remove it, or allow calls"
        yield Problem(f"{key}.name", message, name)


def late_enough(config: RunConfig) -> Iterator[Problem]:
    patience_s, deadline_s = config.loop.batch_deadline_s / 2, config.rewards.late.deadline_s
    if deadline_s > patience_s and not config.rewards.late.names and any(True for _ in _named(config, *LATE)):
        message = f"the learner goes on without what has not come after loop.batch_deadline_s / 2 = {patience_s:g} s"
        yield Problem("rewards.late.deadline_s", message, deadline_s, warning=True)


def spread(config: RunConfig) -> Iterator[Problem]:
    for key, name, _ in _named(config, *MEASURED):
        if config.buffer.drop_uniform_groups:
            message = (
                f"{name} is measured when a batch is trained, and groups that are uniform without it are dropped before; "
                "buffer.drop_uniform_groups=false keeps them"
            )
            yield Problem(f"{key}.name", message, name, warning=True)


CHECKS: list[Callable[[RunConfig], Iterator[Problem]]] = [
    numbers,
    process_reward_model,
    something_to_look_at,
    late_enough,
    spread,
]
