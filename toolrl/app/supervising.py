"""What supervision does in a step of the loop: before the learner gets a group, and after it has trained.

Before: hints are taken out, and the gap between engine and trainer is read where the sequence no longer tells it
(`toolrl.supervision.hints`). After: corrections of failed trajectories are learnt (`toolrl.app.reflecting`), good trajectories
are kept as references, references of failed tasks are learnt (`toolrl.supervision.erroneous`), and every so many steps some of
any task (`interleaved`).

Invariant: what a step draws depends on the seed, the step and the references there are, so a resumed run draws the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from learner.sequence import TrainSequence
from learner.turns import bare_sequences
from toolrl.algorithms.groups import counts
from toolrl.app.lessons import Learns, Lesson, taught
from toolrl.app.reflecting import reflect
from toolrl.config import RunConfig
from toolrl.supervision import is_reference
from toolrl.supervision.erroneous import failed_groups
from toolrl.supervision.guidance import guided_by, own_samples
from toolrl.supervision.hints import without_hint
from toolrl.trajectory import Trajectory

if TYPE_CHECKING:
    from toolrl.app.parts import Parts  # brings Ray, which nothing here needs

Groups = Sequence[Sequence[Trajectory]]
Metrics = dict[str, float]


class Measures(Protocol):
    """The part of `actors.learner_group.LearnerGroup` that reads."""

    async def logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]: ...


def without_hints(groups: Groups) -> list[list[Trajectory]]:
    """The groups as they are trained."""
    return [[without_hint(member) for member in group] for group in groups]


async def with_engine_gaps(
    learner: Measures, recorded: Sequence[Trajectory], sequences: Sequence[TrainSequence]
) -> list[TrainSequence]:
    """The sequences, those of hinted trajectories with log π_old − log μ as it is after the prompts with the hint.

    Args:
        recorded: the batch's trajectories as the engine played them; `sequences` were made of them without the hints.
    """
    hinted = [each for each in recorded if guided_by(each) == "hint" and counts(each)]
    if not hinted:
        return list(sequences)
    seen = bare_sequences(hinted)
    measured = await learner.logprobs(seen)
    gaps = iter([_gap(logp, sequence) for logp, sequence in zip(measured, seen, strict=True)])
    ids = {each.id for each in hinted}
    return [replace(each, engine_gap=next(gaps)) if each.trajectory_id in ids else each for each in sequences]


def _gap(logp: np.ndarray, seen: TrainSequence) -> np.ndarray:
    return np.where(seen.policy_mask, logp - seen.rollout_logp, 0.0).astype(np.float32)


async def supervise(parts: Parts, step: int, groups: Groups) -> Metrics:
    """Keeps, teaches and counts after `step` trained on `groups`; the metrics of what supervision is on."""
    config, references = parts.config, parts.references
    settings = config.supervision
    metrics = _seats(groups) if settings.off_policy.per_group or settings.hint.per_group else {}
    if parts.reflection is not None:
        metrics |= await reflect(parts.reflection, parts.learner, step, groups)
    if references is None:
        return metrics
    await _keep(references, config, groups)
    if settings.erroneous.enabled:
        metrics |= await _learn_failed(parts.learner, references, config, step, groups)
    every = settings.interleaved.every_steps
    if every:
        lesson = Lesson([], 0)
        if step % every == 0:
            lesson = await teach(
                parts.learner,
                references,
                steps=settings.interleaved.steps,
                batch_size=settings.interleaved.batch_size,
                learning_rate=settings.interleaved.learning_rate,
                key=f"{config.seed}/interleaved/{step}",
            )
        metrics |= lesson.metrics("interleaved")
    tasks, own = await references.counts.remote()
    return {**metrics, "supervision/references": float(tasks), "supervision/references/own": float(own)}


async def teach(
    learner: Learns, references: Any, *, steps: int, batch_size: int, learning_rate: float | None, key: str
) -> Lesson:
    """Supervised steps on references of any tasks; none where there are no references.

    Args:
        references: the Ray handle of the run's `References`.
        steps: 0: as many as show every reference once.
        learning_rate: None: the schedule's now.
        key: what the draw depends on beside the references.
    """
    if steps == 0:
        tasks, _ = await references.counts.remote()
        drawn = await references.sample.remote(tasks, random.Random(key))
        batches = [drawn[start : start + batch_size] for start in range(0, len(drawn), batch_size)]
    else:
        draws = [random.Random(f"{key}/{number}") for number in range(steps)]
        batches = [await references.sample.remote(batch_size, draw) for draw in draws]
    return await taught(learner, [batch for batch in batches if batch], learning_rate)


async def _keep(references: Any, config: RunConfig, groups: Groups) -> None:
    """The right ones among the policy's own samples."""
    wanted = config.supervision.references
    whole = config.rewards.weights.get("outcome", 1.0)
    own = own_samples(member for group in groups for member in group) if wanted.own else []
    good = [
        each
        for each in own
        if "outcome" in each.rewards and is_reference(each, full_outcome=whole, min_calls=wanted.min_calls)
    ]
    if good:
        await references.keep.remote(good)


async def _learn_failed(learner: Learns, references: Any, config: RunConfig, step: int, groups: Groups) -> Metrics:
    settings = config.supervision.erroneous
    failed = failed_groups(groups, full_outcome=config.rewards.weights.get("outcome", 1.0))
    prompts = [without_hint(group[0]).prompt_ids for group in failed]
    found = [each for prompt in prompts if (each := await references.for_task.remote(prompt)) is not None]
    if len(found) > settings.max_references:
        found = random.Random(f"{config.seed}/erroneous/{step}").sample(found, settings.max_references)
    lesson = await taught(learner, [found] if found else [], settings.learning_rate)
    return {**lesson.metrics("erroneous"), "supervision/erroneous/failed_tasks": float(len(failed))}


def _seats(groups: Groups) -> Metrics:
    """By guide: the share of the batch's trajectories, and their mean reward."""
    members = [member for group in groups for member in group]
    metrics = {}
    for guide in ("reference", "hint"):
        guided = [member.reward for member in members if guided_by(member) == guide]
        metrics[f"supervision/seats/{guide}"] = len(guided) / max(1, len(members))
        if guided:
            metrics[f"supervision/reward/{guide}"] = fmean(guided)
    return metrics
