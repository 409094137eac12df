"""Combinations of supervision signals that cannot work, found before anything starts. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from toolrl.config import RunConfig
from toolrl.config_reflection_checks import REFLECTION_CHECKS
from toolrl.errors import Problem

_PLACE = re.compile(r"\{(\w*)\}")


def seats(config: RunConfig) -> Iterator[Problem]:
    """Every group holds samples of the policy's own: without them nothing is said of it, and nothing is on its policy."""
    given, hinted, size = (
        config.supervision.off_policy.per_group,
        config.supervision.hint.per_group,
        config.loop.group_size,
    )
    if given + hinted and given + hinted >= size:
        key = "off_policy" if given >= hinted else "hint"
        message = (
            f"off_policy.per_group + hint.per_group = {given + hinted} leaves no sample of the policy's own in "
            f"loop.group_size={size}; at most {size - 1} together"
        )
        yield Problem(f"supervision.{key}.per_group", message, max(given, hinted))


def references(config: RunConfig) -> Iterator[Problem]:
    """Whoever asks for references must be able to get some."""
    s = config.supervision
    sources = s.references
    by_task = [key for key, on in (("off_policy", s.off_policy.per_group), ("erroneous", s.erroneous.enabled)) if on]
    users = [*by_task, *(["interleaved"] if s.interleaved.every_steps else [])]
    if sources.path is not None and not Path(sources.path).exists():
        yield Problem("supervision.references.path", "no such file", sources.path)
    if sources.solved_tasks and all(tool.name != "python" for tool in config.tools):
        message = "are solved by programs, which the tool python runs; add it to tools, or set 0"
        yield Problem("supervision.references.solved_tasks", message, sources.solved_tasks)
    given = sources.path is not None or sources.solved_tasks or (sources.cold_start and config.cold_start.steps)
    if users and not given and not sources.own:
        message = (
            f"{users[0]} has no reference to learn from: set a file, or supervision.references.solved_tasks, or own=true, "
            "or cold_start.steps above 0"
        )
        yield Problem("supervision.references.path", message, sources.path)
    elif by_task and not given and config.tasks.kind == "reasoning_gym":
        message = (
            f"{by_task[0]} wants references of the tasks that are played, and those of reasoning_gym rarely come again, so "
            "the run's own are of little use to it; set some, e.g. loop.steps × loop.groups_per_step"
        )
        yield Problem("supervision.references.solved_tasks", message, sources.solved_tasks, warning=True)


def erroneous(config: RunConfig) -> Iterator[Problem]:
    rewarded = [part.name.rpartition(":")[2] for part in config.rewards.components]
    if config.supervision.erroneous.enabled and "outcome" not in rewarded:
        message = "supervision.erroneous knows a failed task by the reward `outcome`, and there is none; add it"
        yield Problem("rewards.components", message, rewarded)
    if config.supervision.erroneous.enabled and config.buffer.drop_uniform_groups:
        message = (
            "drops the groups whose samples all failed alike, which are those that supervision.erroneous learns from; "
            "set false"
        )
        yield Problem("buffer.drop_uniform_groups", message, True)


def hint_text(config: RunConfig) -> Iterator[Problem]:
    hint = config.supervision.hint
    if hint.per_group and not hint.text.strip():
        yield Problem("supervision.hint.text", "is empty; write what the system message is to say", hint.text)
    for place in _PLACE.findall(hint.text):
        if place != "answer":
            message = f"{{{place}}} stands for nothing; only {{answer}} does"
            yield Problem("supervision.hint.text", message, hint.text)


def interleaved(config: RunConfig) -> Iterator[Problem]:
    every = config.supervision.interleaved.every_steps
    if every > config.loop.steps:
        message = f"never comes: the run has loop.steps={config.loop.steps}; set less, or 0 for none"
        yield Problem("supervision.interleaved.every_steps", message, every, warning=True)


SUPERVISION_CHECKS: list[Callable[[RunConfig], Iterator[Problem]]] = [
    seats,
    references,
    erroneous,
    interleaved,
    hint_text,
    *REFLECTION_CHECKS,
]
