"""Evaluation out of distribution: which variants of a run's settings are played, and what they show beside the run's own.

Invariants:
- A variant is played on the engines that are there. One that cannot be is left out, and the table says why.
- The run's own distribution and every variant are sampled with the same seeds.
- An episode has as much room under a variant as under the run's own settings, however long the variant's prompts are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.worker_setup import Setup, parser_alone
from toolrl.app.evaluation_table import evaluation_table
from toolrl.app.ood_table import ood_table
from toolrl.config import Named, RunConfig
from toolrl.conversation.template import TemplateRefused
from toolrl.errors import UserError
from toolrl.trajectory import Trajectory
from toolrl.variants import NotApplicable, Varied, variants

# Plays the first so many held-out tasks under these settings.
PlayUnder = Callable[[RunConfig, int], Awaitable[list[Trajectory]]]


@dataclass(frozen=True)
class Planned:
    """A variant that will be played."""

    name: str
    what: str
    config: RunConfig
    tasks: int


@dataclass(frozen=True)
class OodPlan:
    """What of `eval.ood` is played, and what is not."""

    planned: list[Planned]
    left_out: dict[str, str]  # variant -> why
    context_tokens: int  # of an engine that serves all of it

    @classmethod
    def of(cls, config: RunConfig, model_dir: str | Path, *, most_context_tokens: int | None = None) -> OodPlan:
        """Makes every variant once, as the workers will: seconds each. The toolboxes are not opened.

        Args:
            most_context_tokens: that an engine may be started with; None: engines have the run's own limit.

        Raises:
            UserError: an option of a variant that cannot work; says which.
        """
        most = max(config.rollout.max_context_tokens, most_context_tokens or 0)
        own = _longest_prompt(Setup.of(config, model_dir))
        planned, left_out = [], {}
        for part in config.eval.ood:
            try:
                planned.append(_planned(part, config, Path(model_dir), own, most))
            except (NotApplicable, TemplateRefused) as reason:
                left_out[part.name] = str(reason)
        widest = max([config.rollout.max_context_tokens, *(each.config.rollout.max_context_tokens for each in planned)])
        return cls(planned, left_out, widest)


def _planned(part: Named, config: RunConfig, model_dir: Path, own_prompt: int, most_context_tokens: int) -> Planned:
    """Raises NotApplicable or TemplateRefused for what cannot be played, UserError for what is asked wrongly."""
    try:
        varied: Varied = variants.get(part.name)(config, **part.options)
    except TypeError as error:  # an option that a variant of the user's own does not take
        raise UserError(f"eval.ood: {part.name}: {error}") from error
    try:
        setup = Setup.of(varied.config, model_dir)
        held_out = setup.tasks.held_out()
    except TemplateRefused:
        raise
    except UserError as error:
        raise UserError(f"eval.ood: {part.name} ({varied.what}): {error}") from error
    if not held_out:
        raise NotApplicable("it has no held-out task")
    settings = _with_room(varied.config, own_prompt, _longest_prompt(setup), most_context_tokens)
    return Planned(part.name, varied.what, settings, len(held_out))


def _longest_prompt(setup: Setup) -> int:
    """Tokens of the longest prompt of the held-out tasks."""
    return max((len(setup.chat.prompt_ids(task.messages)) for task in setup.tasks.held_out()), default=0)


def _with_room(config: RunConfig, own_prompt: int, prompt: int, most_context_tokens: int) -> RunConfig:
    """The settings with a context so long that an episode has the room it has under the run's own."""
    r = config.rollout
    needed = prompt + min(r.max_response_tokens, r.max_context_tokens - own_prompt)
    if needed > most_context_tokens:
        raise NotApplicable(
            f"its prompts take up to {prompt} tokens where the run's take {own_prompt}, so it needs a context of {needed} "
            f"tokens and {most_context_tokens} are there; raise rollout.max_context_tokens, if the model allows it"
        )
    return replace(config, rollout=replace(r, max_context_tokens=max(r.max_context_tokens, needed)))


async def compare(
    plan: OodPlan,
    own: dict[str, Any],
    play: PlayUnder,
    model_dir: str | Path,
    keep: Callable[[str, list[Trajectory]], None] | None = None,
) -> dict[str, Any]:
    """Plays every planned variant, one after the other; the table of `ood_table` beside `own`, the run's own distribution.

    Args:
        keep: given each variant's episodes.
    """
    measured = {}
    for each in plan.planned:
        episodes = await play(each.config, each.tasks)
        table = await asyncio.to_thread(table_of, episodes, each.config, model_dir)
        measured[each.name] = (each.what, table)
        if keep is not None:
            await asyncio.to_thread(keep, each.name, episodes)
    return ood_table(own, measured, plan.left_out)


def table_of(episodes: list[Trajectory], config: RunConfig, model_dir: str | Path) -> dict[str, Any]:
    """`evaluation_table` of episodes played under these settings."""
    return evaluation_table(
        episodes,
        outcome_weight=config.rewards.weights.get("outcome", 1.0),
        format_state=parser_alone(config.rollout.parser, str(model_dir)).format_state,
    )
