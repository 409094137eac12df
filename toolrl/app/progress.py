"""Where a run is, and how it gets there: a new run's beginning, new weights for everybody, checkpoints, a resumed run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolrl.app import reference_sources, reflecting
from toolrl.app.cold_start import cold_start
from toolrl.app.parts import Parts
from toolrl.app.pausing import Pausing
from toolrl.app.viewer.view import View
from toolrl.guards.presets import rules


@dataclass
class Progress:
    """Where the run is."""

    step: int = 0  # batches trained
    version: int = 0  # of the learner's weights
    batch_id: int | None = None  # the lease to keep alive
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    guards: Mapping[str, Any] = field(default_factory=dict)  # what the checkpoint that it goes on from held of them
    saved_step: int | None = None  # of the last checkpoint
    pausing: Pausing = field(default_factory=Pausing)


async def publish_weights(parts: Parts, progress: Progress, version: int, view: View) -> None:
    """The learner's weights are `version` from here on, for every engine: at once, or when the engines' turn comes."""
    progress.version = version
    if not parts.turns.shared:
        await _deliver(parts, progress, view)


async def engines_turn(parts: Parts, progress: Progress, view: View) -> None:
    """To be waited for by whoever has engines generate."""
    await parts.turns.engines(lambda: _deliver(parts, progress, view))


async def _deliver(parts: Parts, progress: Progress, view: View) -> None:
    """Learner to every engine, then to the buffer, which hands out tickets by version."""
    delivery = await parts.weights.publish(progress.version)
    if delivery.broke:
        view.note(f"weights {progress.version} went through memory, the group with the learner broke: {delivery.broke}")
    for worker, why in delivery.behind.items():
        view.note(f"{worker} is behind weights {progress.version}: {why}")
    await parts.buffer.set_version.remote(progress.version)


async def save_checkpoint(
    parts: Parts, progress: Progress, guards: Mapping[str, Any] | None = None, *, is_good: bool = True
) -> None:
    """Learner state first, the mark that makes the folder a checkpoint last; one that was there makes room before.

    Args:
        guards: what they remember, see `toolrl.app.guarding`.
        is_good: whether a roll-back may go to it.
    """
    folder = parts.folder
    await parts.turns.learner()
    folder.remove_checkpoint(progress.step)
    await parts.learner.save(str(folder.checkpoint(progress.step)))
    await reference_sources.save_own(parts.references, folder.checkpoint(progress.step))
    reflecting.save(parts.reflection, folder.checkpoint(progress.step))
    folder.save_checkpoint_state(progress.step, progress.version, guards=guards or {}, is_good=is_good)
    folder.prune_checkpoints(parts.config.loop.keep_checkpoints)
    progress.saved_step = progress.step


async def begin(parts: Parts, view: View) -> Progress:
    """A new run: the model folder is version 0; the cold start, if there is one, makes version 1. A checkpoint is kept of
    what took time to make, and where a guard may want to go back to it."""
    progress = Progress()
    starts_cold = parts.config.cold_start.steps > 0
    if starts_cold:
        await parts.turns.learner()
        await cold_start(parts.config, parts.folder, parts.learner, view)
        await publish_weights(parts, progress, 1, view)
    await reference_sources.fill(parts.references, parts.config, parts.folder, view)
    if starts_cold or any(rule.action.name == "roll_back" for rule in rules(parts.config)):
        await save_checkpoint(parts, progress)
    return progress


async def restore(parts: Parts, view: View) -> Progress:
    """The last checkpoint: learner, weights of the engines, and the ledger put back to it. From the start without one."""
    state = parts.folder.latest_checkpoint()
    if state is None:
        view.note("no checkpoint yet: from the start")
        await parts.buffer.rollback_to.remote(0, 0)
        return await begin(parts, view)
    await parts.turns.learner()
    await parts.learner.load(str(state.path))
    await reference_sources.fill(parts.references, parts.config, parts.folder, view)
    await reference_sources.load_own(parts.references, state.path)
    await reflecting.load(parts.reflection, state.path)
    undone = await parts.buffer.rollback_to.remote(state.step, state.version)
    progress = Progress(step=state.step, version=state.version, guards=state.guards, saved_step=state.step)
    await publish_weights(parts, progress, state.version, view)
    view.note(f"resumed after step {state.step}: {undone['untrained']} groups are trained again from there")
    return progress
