"""Settings of evaluation out of distribution, and of tools under other names, that cannot work. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from toolrl.config import RunConfig
from toolrl.errors import Problem

_CODE_FORMATS = ("fenced", "tagged")


def variants(config: RunConfig) -> Iterator[Problem]:
    names = [part.name for part in config.eval.ood]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"eval.ood.{index}.name", "this variant is listed twice; remove one", name)
    if not config.loop.eval_ood:
        return
    if not names:
        message = "asks for an evaluation out of distribution, and eval.ood names no variant; name some, or set false"
        yield Problem("loop.eval_ood", message, True)
    if config.tasks.held_out_tasks == 0:
        yield Problem("loop.eval_ood", "there are no held-out tasks to play: set tasks.held_out_tasks above 0", True)


def renamed(config: RunConfig) -> Iterator[Problem]:
    for index, tool in enumerate(config.tools):
        key = f"tools.{index}.rename"
        if tool.rename and config.rollout.parser in _CODE_FORMATS:
            message = (
                f"rollout.parser={config.rollout.parser} writes code without names of tools; remove it, or set hermes"
            )
            yield Problem(key, message, tool.rename)
        for old, new in tool.rename.items():
            if not new.strip():
                yield Problem(f"{key}.{old}", "must be a name", new)
        if tool.delay and set(tool.delay) != {"mean_s", "p99_s"}:
            yield Problem(f"tools.{index}.delay", "needs mean_s and p99_s, and nothing else", tool.delay)


def wording(config: RunConfig) -> Iterator[Problem]:
    for name in ("system_frame", "question_frame"):
        frame = getattr(config.tasks.wording, name)
        if frame is not None and "{}" not in frame:
            message = "has no {}, for which the text stands: the prompt would be lost"
            yield Problem(f"tasks.wording.{name}", message, frame)


CHECKS: list[Callable[[RunConfig], Iterator[Problem]]] = [variants, renamed, wording]
