"""The options of named parts: known, complete, of the right words and in range. Imports no torch.

A part of the user's own (`module:attribute`) is asked when it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from toolrl import registered_names
from toolrl.config import Named, RunConfig
from toolrl.errors import Problem
from toolrl.registry import nearest

_PENALISES = ("format", "call_failure", "call_validity", "parse_failure", "timeout")
# `part.option`, or `option` of any algorithm: lowest, highest, whether the lowest and the highest are excluded, in words.
_RANGES: dict[str, tuple[float, float, bool, bool, str]] = {
    "weight": (-math.inf, math.inf, True, True, "finite"),
    "gamma": (0, 1, False, False, "0 to 1"),
    "lam": (0, 1, False, False, "0 to 1"),
    "kappa": (0, math.inf, False, True, "0 or more"),
    "clip": (1, math.inf, False, True, "at least 1: weights lie between 1/clip and clip"),
    "clip_low": (0, 1, False, True, "0 to below 1: the ratio's lower bound is 1 − clip_low"),
    "ctpo.clip_low": (0, math.inf, False, True, "0 or more"),
    "clip_high": (0, math.inf, False, True, "0 or more: the ratio's upper bound is 1 + clip_high"),
    "token.dual_clip": (1, math.inf, True, True, "above 1 (3 is usual), or null for none"),
    "ctpo.dual_clip": (0, math.inf, True, True, "above 0, or false for none"),
    "power": (-math.inf, math.inf, True, True, "finite"),
    "delta": (0, 1, True, False, "above 0 and at most 1: a difference of probabilities"),
    "w_min": (0, 1, False, False, "0 to 1"),
    "cap": (1, math.inf, False, True, "at least 1: where engine and trainer agree the weight is 1"),
    "low": (0, 1, False, False, "0 to 1: bounds that exclude 1 drop what engine and trainer agree on"),
    "high": (1, math.inf, False, True, "at least 1: bounds that exclude 1 drop what engine and trainer agree on"),
    "code_similarity.alpha": (0, 1, False, False, "0 to 1: a wrong answer is worth no more than a right one"),
    "call_cost.cost": (0, math.inf, False, True, "0 or more: it is taken off"),
    "call_cost.most": (0, math.inf, True, True, "above 0, or null for no bound"),
    "call_success.bonus": (0, math.inf, False, True, "0 or more"),
    "result_use.bonus": (0, math.inf, False, True, "0 or more"),
    **{f"{name}.penalty": (0, math.inf, False, True, "0 or more: it is taken off") for name in _PENALISES},
    "overlong.max_tokens": (1, math.inf, False, True, "at least 1"),
    "overlong.ramp_tokens": (0, math.inf, False, True, "0 (a step) or more"),
}

# The same for the options of guards' actions, whatever the action.
_ACTION_RANGES: dict[str, tuple[float, float, bool, bool, str]] = {
    "weight": (0, math.inf, False, True, "0 or more"),
    "factor": (0, 1, True, True, "above 0 and below 1"),
    "floor": (0, 1, True, False, "above 0 and at most 1"),
    "fade": (0, 1, False, True, "0 (at once) to below 1: what is left a step"),
    "growth": (1, math.inf, True, True, "above 1"),
    "least": (0, math.inf, True, True, "above 0"),
    "most": (0, math.inf, True, True, "above 0"),
    "steps": (1, math.inf, False, True, "at least 1"),
    "batch_size": (1, math.inf, False, True, "at least 1"),
    "most_in_a_row": (1, math.inf, False, True, "at least 1"),
    "margin_steps": (0, math.inf, False, True, "0 or more"),
    "learning_rate": (0, 1, True, False, "above 0 and at most 1, or null for the schedule's"),
    "deadline_s": (0, math.inf, True, True, "above 0"),
}


# Options that the sources of a method give it, and that are another part's here.
_ELSEWHERE = {
    f"gtpo.{option}": "gtpo's shaping of wrong outcomes is the reward code_similarity, which takes this option"
    for option in ("alpha", "embedder", "outcome_reward")
}


def parts(config: RunConfig) -> Iterator[tuple[str, str, Named]]:
    """(key, kind, part) of every named part that takes options."""
    a = config.algorithm
    yield "algorithm.advantage", "advantage", a.advantage
    yield "algorithm.policy_loss", "policy loss", a.policy_loss
    if a.correction is not None:
        yield "algorithm.correction", "correction", a.correction
    for index, part in enumerate(a.regularizers):
        yield f"algorithm.regularizers.{index}", "regulariser", part
    for index, part in enumerate(config.rewards.components):
        yield f"rewards.components.{index}", "reward", part
    for index, rule in enumerate(config.guards.rules):
        yield f"guards.rules.{index}.action", "guard action", rule.action
    for index, part in enumerate(config.eval.ood):
        yield f"eval.ood.{index}", "evaluation variant", part


def known_options(config: RunConfig) -> Iterator[Problem]:
    """Options that a part does not take, and those it cannot do without."""
    for key, kind, part in parts(config):
        found = registered_names.options(kind, part.name)
        if found is None:
            continue
        taken, required = found
        if kind == "regulariser":  # its weight is the learner's; without one nobody would know how strong it is
            taken, required = taken | {"weight"}, required | {"weight"}
        for option, value in part.options.items():
            if option not in taken:
                told = f"{part.name} has no such option{nearest(option, list(taken)) if taken else '; it takes none'}"
                told = _ELSEWHERE.get(f"{part.name}.{option}", told)
                yield Problem(f"{key}.options.{option}", told, value)
        for option in sorted(required - set(part.options)):
            yield Problem(f"{key}.options.{option}", f"{part.name} needs this option", has_value=False)


def option_values(config: RunConfig) -> Iterator[Problem]:
    """Words that are none of the choices, numbers out of range."""
    for key, kind, part in parts(config):
        if part.name not in registered_names.registered(kind):
            continue
        words = registered_names.choices(kind, part.name)
        for option, value in part.options.items():
            where = f"{key}.options.{option}"
            if option in words and value not in words[option]:
                hint = nearest(str(value), list(words[option])).partition("; known")[0]
                yield Problem(where, f"must be one of {', '.join(words[option])}{hint}", value)
            elif told := _out_of_range(kind, part.name, option, value):
                yield Problem(where, told, value)


def _out_of_range(kind: str, name: str, option: str, value: Any) -> str | None:
    if kind == "guard action":
        bounds = _ACTION_RANGES.get(option)
    else:
        bounds = _RANGES.get(f"{name}.{option}") or (None if kind == "reward" else _RANGES.get(option))
    if bounds is None or value is None or isinstance(value, bool):
        return None
    low, high, above, below, words = bounds
    if not isinstance(value, int | float):
        return f"must be a number: {words}"
    outside = value < low or value > high or (above and value == low) or (below and value == high)
    return f"must be {words}" if outside or math.isnan(value) else None


CHECKS: list[Callable[[RunConfig], Iterator[Problem]]] = [known_options, option_values]
