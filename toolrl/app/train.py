"""The whole loop: one coroutine keeps rollouts going, one trains. Everything else is started, stopped and named elsewhere.

    workers pull tickets ─► episodes ─► replay buffer ─► batch ─► learner ─► weights ─► workers
                                             ▲                        │
                                             └──── version ◄──────────┘

A step: lease a batch of whole groups, compute advantages, let the learner take its optimiser steps, acknowledge the batch,
publish the weights, tell the buffer the new version (which admits new tickets), write down what was seen, and every so often
a checkpoint. Acknowledgement and checkpoint carry the step's number: a run that was killed between them trains that batch
again from the checkpoint's weights (`rollback_to`), so nothing is lost and nothing counts twice.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.replay import Batch
from actors.worker_setup import Setup, parser_alone
from learner.sequence import sequences_from
from toolrl.algorithms.groups import group_advantages
from toolrl.app.cold_start import cold_start
from toolrl.app.evaluation_table import evaluation_table
from toolrl.app.model_folder import prepare_model, run_folder
from toolrl.app.parts import Parts, start_parts
from toolrl.app.run_folder import RunFolder
from toolrl.app.viewer.view import View
from toolrl.config import RunConfig
from toolrl.errors import RunError
from toolrl.monitors import batch_metrics
from toolrl.monitors.sandbox import sandbox_metrics
from toolrl.trajectory import Trajectory

EXPIRE_EVERY_S = 2.0


@dataclass
class Progress:
    """Where the run is."""

    step: int = 0  # batches trained
    version: int = 0  # of the learner's weights
    batch_id: int | None = None  # the lease to keep alive
    evaluations: list[dict[str, Any]] = field(default_factory=list)


class BatchLate(RunError):
    """No batch came within `loop.batch_deadline_s`; the message says for whom it waited."""


def train(config: RunConfig, *, resume: bool = False) -> Path:
    """Runs `config` to its last step; returns the run's folder.

    Args:
        resume: continue the run of this name at its last checkpoint.
    """
    if not resume:
        check_first(config)
    with RunFolder(run_folder(config)).held():
        if resume:
            RunFolder.check_resumable(config)
            check_first(config)
        folder = RunFolder.create(config)
        with View(config, folder) as view:
            asyncio.run(_train(config, folder, view, resume))
    return folder.path


def check_first(config: RunConfig) -> None:
    """Makes the model folder and, once, what every worker makes of the settings: a mistake starts nothing and leaves no run.

    Raises:
        UserError: says what to change.
    """
    place = run_folder(config)
    is_new = not place.exists()
    try:
        Setup.of(config, prepare_model(config))
    except BaseException:
        if is_new:
            shutil.rmtree(place, ignore_errors=True)
        raise


async def _train(config: RunConfig, folder: RunFolder, view: View, resume: bool) -> None:
    view.stage("starting Ray, the learner and the engines")
    async with start_parts(config, folder) as parts:
        progress = await (restore(parts, view) if resume else begin(parts, view))
        await evaluate(parts, progress, view)
        await _until_trained(train_policy(parts, progress, view), keep_rollouts_going(parts, progress))
        await evaluate(parts, progress, view)
        await parts.learner.export(str(folder.final))
        view.finish(progress.evaluations, await parts.buffer.ledger.remote())


async def keep_rollouts_going(parts: Parts, progress: Progress) -> None:
    """Workers pull by themselves. Here the dead are replaced, and leases of the silent are taken back."""

    async def watch_leases() -> None:
        while True:
            if progress.batch_id is not None:
                await parts.buffer.heartbeat_batch.remote(progress.batch_id)
            await parts.buffer.expire.remote()
            parts.workers.channel.retry()
            await asyncio.sleep(EXPIRE_EVERY_S)

    parts.workers.begin()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(parts.workers.watch())
        tasks.create_task(watch_leases())
        if parts.sandbox_hosts is not None:
            tasks.create_task(parts.sandbox_hosts.watch())


async def train_policy(parts: Parts, progress: Progress, view: View) -> None:
    """Trains until the last step."""
    config = parts.config
    format_state = parser_alone(config.rollout.parser, str(parts.folder.model)).format_state
    while progress.step < config.loop.steps:
        started = time.monotonic()
        batch = await next_batch(parts, progress)
        groups = batch.trajectories()
        trajectories = [member for group in groups for member in group]
        waited = time.monotonic()
        learnt = await learn(parts, groups)
        progress.step += 1
        await parts.buffer.ack.remote(batch.batch_id, progress.step, progress.version + 1)
        progress.batch_id = None
        trained = time.monotonic()
        await publish_weights(parts, progress, progress.version + 1, view)
        metrics = {
            **batch_metrics(trajectories, learner_version=progress.version - 1, format_state=format_state),
            **learnt,
            "time/rollout_s": waited - started,  # how long the learner waited for its batch
            "time/learn_s": trained - waited,
            "time/publish_s": time.monotonic() - trained,
            **await gauges(parts),
        }
        view.step(progress.step, progress.version, metrics, trajectories)
        if progress.step % config.loop.checkpoint_every_steps == 0 or progress.step == config.loop.steps:
            await save_checkpoint(parts, progress)
        if config.loop.eval_every_steps and progress.step % config.loop.eval_every_steps == 0:
            await evaluate(parts, progress, view)


async def next_batch(parts: Parts, progress: Progress) -> Batch:
    """Waits for whole groups, none of them older than the staleness bound. Raises BatchLate."""
    loop = parts.config.loop
    batch: Batch | None = await parts.buffer.wait_for_batch.remote(
        "learner",
        loop.groups_per_step,
        progress.version,
        timeout_s=loop.batch_deadline_s,
        patience_s=loop.batch_deadline_s / 2,
        request=f"step {progress.step + 1} on version {progress.version}",
    )
    if batch is None:
        raise BatchLate(
            f"no batch for step {progress.step + 1} in loop.batch_deadline_s={loop.batch_deadline_s:g} s: "
            f"{await parts.buffer.waiting_for.remote()}"
        )
    progress.batch_id = batch.batch_id
    return batch


async def learn(parts: Parts, groups: list[list[Trajectory]]) -> dict[str, float]:
    """Advantages by group, then the learner's optimiser steps; returns its metrics."""
    advantage = parts.config.algorithm.advantage
    members = [member for group in groups for member in group]
    advantages = [a for group in groups for a in group_advantages(advantage.name, group, **advantage.options)]
    return await parts.learner.train(sequences_from(members, advantages))


async def publish_weights(parts: Parts, progress: Progress, version: int, view: View) -> None:
    """Learner to every engine, then to the buffer, which hands out tickets by version."""
    publication = await parts.learner.publish(version, checksum=parts.config.weights.checksum)
    delivery = await parts.workers.publish(publication)
    for worker, why in delivery.behind.items():
        view.note(f"{worker} is behind weights {version}: {why}")
    progress.version = version
    await parts.buffer.set_version.remote(version)


async def save_checkpoint(parts: Parts, progress: Progress) -> None:
    """Learner state first, the mark that makes the folder a checkpoint last."""
    folder = parts.folder
    await parts.learner.save(str(folder.checkpoint(progress.step)))
    folder.save_checkpoint_state(progress.step, progress.version)
    folder.prune_checkpoints(parts.config.loop.keep_checkpoints)


async def begin(parts: Parts, view: View) -> Progress:
    """A new run: the model folder is version 0; the cold start, if there is one, makes version 1."""
    progress = Progress()
    if parts.config.cold_start.steps > 0:
        await cold_start(parts.config, parts.folder, parts.learner, view)
        await publish_weights(parts, progress, 1, view)
        await save_checkpoint(parts, progress)
    return progress


async def restore(parts: Parts, view: View) -> Progress:
    """The last checkpoint: learner, weights of the engines, and the ledger put back to it. From the start without one."""
    state = parts.folder.latest_checkpoint()
    if state is None:
        view.note("no checkpoint yet: from the start")
        await parts.buffer.rollback_to.remote(0, 0)
        return await begin(parts, view)
    await parts.learner.load(str(state.path))
    undone = await parts.buffer.rollback_to.remote(state.step, state.version)
    progress = Progress(step=state.step, version=state.version)
    await publish_weights(parts, progress, state.version, view)
    view.note(f"resumed after step {state.step}: {undone['untrained']} groups are trained again from there")
    return progress


async def evaluate(parts: Parts, progress: Progress, view: View) -> None:
    """Plays the held-out tasks and keeps the table."""
    config = parts.config
    if config.tasks.held_out_tasks == 0:
        return
    view.stage("playing the held-out tasks")
    temperature = config.loop.eval_temperature
    episodes = await parts.workers.evaluate(
        config.tasks.held_out_tasks,
        config.loop.eval_samples,
        config.rollout.temperature if temperature is None else temperature,
    )
    weight = config.rewards.weights.get("outcome", 1.0)
    parser = parser_alone(config.rollout.parser, str(parts.folder.model))
    table = evaluation_table(episodes, outcome_weight=weight, format_state=parser.format_state)
    progress.evaluations.append(table)
    view.evaluated(progress.step, table)


async def gauges(parts: Parts) -> dict[str, float]:
    """Queue depths and the workers' own gauges."""
    stats = await parts.workers.stats()
    hosts = [] if parts.sandbox_hosts is None else await parts.sandbox_hosts.stats()
    return {
        **{f"buffer/{name}": float(value) for name, value in (await parts.buffer.stats.remote()).items()},
        "worker/running_episodes": float(sum(each["running"] for each in stats)),
        "worker/loop_lag_s": max((each["loop_lag_s"] for each in stats), default=0.0),
        "worker/behind": float(len(parts.workers.channel.behind)),
        **sandbox_metrics([each["sandbox"] for each in stats], hosts),
    }


async def _until_trained(training: Coroutine[Any, Any, None], rollouts: Coroutine[Any, Any, None]) -> None:
    """Runs both until training is done; a failure of either ends the other and is raised."""
    tasks = [asyncio.create_task(training), asyncio.create_task(rollouts)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if tasks[0] not in done:
            raise RuntimeError("every rollout worker stopped before training was done")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
