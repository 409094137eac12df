"""The rules of guards: names, metrics and actions that exist, numbers that make sense, settings that an action needs.

Imports no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from toolrl import registered_names
from toolrl.config import GuardRuleConfig, RunConfig
from toolrl.errors import ConfigError, Problem
from toolrl.guards.guards import BEFORE_LEARNING
from toolrl.guards.presets import lacking, shipped_and_own
from toolrl.monitors.known_metrics import known, suggestion
from toolrl.registry import nearest


def guards(config: RunConfig) -> Iterator[Problem]:
    """Everything wrong with the guards. Of a preset's rules, those that cannot act are left out: a warning."""
    try:
        shipped, own = shipped_and_own(config)
    except ConfigError as error:
        yield from error.problems
        return
    for name, count in Counter(rule.name for rule in own).items():
        if count > 1:
            yield Problem("guards.rules", f"{count} rules share this name; each needs its own", name)
    for index, rule in enumerate(own):
        key = f"guards.rules.{index}"
        for check in (_names, _numbers, _action):
            yield from check(key, rule)
        if missing := lacking(config, rule):
            yield Problem(f"{key}.{missing[0]}", missing[1], rule.action.name)
    for rule in shipped:
        if missing := lacking(config, rule):
            message = f"its rule {rule.name} is left out: {missing[1]}"
            yield Problem("guards.preset", message, config.guards.preset, warning=True)


def _names(key: str, rule: GuardRuleConfig) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", rule.name):
        yield Problem(f"{key}.name", "names a metric guard/NAME: use letters, digits, '_' and '-'", rule.name)
    if not rule.metric:
        yield Problem(f"{key}.metric", "a rule watches one metric, e.g. tool/call_rate", has_value=False)
    elif (found := known(rule.metric)) is None:
        yield Problem(f"{key}.metric", f"no such metric{suggestion(rule.metric)}", rule.metric)
    elif rule.action.name == BEFORE_LEARNING and found.source != "trajectories":
        message = (
            f"is not known before the batch is trained, when {BEFORE_LEARNING} acts; watch one of the batch itself"
        )
        yield Problem(f"{key}.metric", f"{message}, e.g. format/collapsed", rule.metric)


def _numbers(key: str, rule: GuardRuleConfig) -> Iterator[Problem]:
    condition, threshold, release = rule.condition, rule.threshold, rule.release
    if rule.floor and condition != "above_ema":
        yield Problem(f"{key}.floor", f"{condition} has none; only above_ema does", rule.floor)
    if condition in ("drop_from_peak", "rise_from_low") and threshold <= 0:
        yield Problem(f"{key}.threshold", f"{condition} is a distance: above 0, in the metric's own unit", threshold)
    if condition == "above_ema" and threshold <= 1:
        yield Problem(f"{key}.threshold", "is how many times its running mean the metric may be: above 1", threshold)
    if release is None:
        return
    if condition == "below" and release < threshold:
        yield Problem(f"{key}.release", f"must be at least the threshold {threshold:g}: trouble ends above it", release)
    elif condition != "below" and release > threshold:
        yield Problem(f"{key}.release", f"must be at most the threshold {threshold:g}: trouble ends below it", release)
    elif condition in ("drop_from_peak", "rise_from_low") and release < 0:
        yield Problem(f"{key}.release", f"{condition} is a distance: 0 or more", release)


def _action(key: str, rule: GuardRuleConfig) -> Iterator[Problem]:
    actions, name = registered_names.registered("guard action"), rule.action.name
    if ":" not in name and name not in actions:
        message = f"unknown guard action{nearest(name, list(actions))}, or an import path module:attribute"
        yield Problem(f"{key}.action.name", message, name)


CHECKS: list[Callable[[RunConfig], Iterator[Problem]]] = [guards]
