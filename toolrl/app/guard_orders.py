"""What guards order that takes the learner and the engines: supervised steps on references, and earlier weights.

Versions of the weights only rise, whatever happens to the weights. Trajectories and engines carry higher numbers than an
earlier checkpoint's; were its number used again, tokens of the collapsed policy would pass for tokens of the good one. So the
good weights are published under a new number, and one so high that everything sampled before is beyond the staleness bound:
the buffer lets it be sampled again, by the ordinary rule. Steps and the ledger do not go back either: what was trained stays
trained, once.
"""

from __future__ import annotations

import asyncio

from toolrl.app.lessons import Lesson
from toolrl.app.parts import Parts
from toolrl.app.progress import Progress, publish_weights
from toolrl.app.run_folder import CheckpointState
from toolrl.app.supervising import teach
from toolrl.app.viewer.view import View


async def roll_back(parts: Parts, progress: Progress, view: View, *, margin_steps: int) -> CheckpointState | None:
    """Models and optimiser of the last good checkpoint, published as new weights; None: there is no good one.

    Args:
        margin_steps: how much older than now it is to be, if there is one so old.
    """
    good = await asyncio.to_thread(parts.folder.good_checkpoint, progress.step - margin_steps)
    if good is None:
        return None
    await parts.turns.learner()
    await parts.learner.load(str(good.path), keep_counters=True)
    await publish_weights(parts, progress, progress.version + 1 + parts.config.buffer.max_staleness, view)
    return good


async def sft_burst(
    parts: Parts, progress: Progress, view: View, *, steps: int, batch_size: int, learning_rate: float | None
) -> Lesson:
    """`steps` supervised steps on the run's references, after which the engines have the new weights; no step without a
    reference.

    Args:
        learning_rate: None: the schedule's now.
    """
    await parts.turns.learner()
    lesson = await teach(
        parts.learner,
        parts.references,
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        key=f"{parts.config.seed}/sft-burst/{progress.step}",
    )
    if lesson.losses:
        await publish_weights(parts, progress, progress.version + 1, view)
    return lesson
