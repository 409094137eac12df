"""The whole loop: one coroutine keeps rollouts going, one trains. Everything else is started, stopped and named elsewhere.

    workers pull tickets ─► episodes ─► replay buffer ─► batch ─► learner ─► weights ─► workers
                                             ▲                        │
                                             └──── version ◄──────────┘

A step: lease a batch of whole groups, give the rewards that compare a group's samples or ask the learner, compute
advantages (some from what the learner knows of the batch), let the learner take its optimiser steps, acknowledge the batch,
publish the weights, tell the buffer the new version (which admits new tickets), write down what was seen, and every so often
a checkpoint. Where engines and learner share a GPU they take turns (`toolrl.app.turns`), and engines get the new weights when
they wake.
Acknowledgement and checkpoint carry the step's number: a run that was killed between them trains that batch again from the
checkpoint's weights (`rollback_to`), so nothing is lost and nothing counts twice.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from actors.replay import Batch
from actors.worker_setup import Setup, parser_alone
from learner.sequence import sequences_from
from toolrl.algorithms.batch_advantages import batch_advantages
from toolrl.app import ood, reference_sources, reflecting
from toolrl.app.cold_start import check_cold_start
from toolrl.app.control import taking_orders
from toolrl.app.ending import Ending
from toolrl.app.evidence import charge_kl, gather_evidence, with_targets
from toolrl.app.guarding import Guarding
from toolrl.app.live_orders import orders
from toolrl.app.measured_rewards import MeasuredRewards
from toolrl.app.model_folder import prepare_model, run_folder
from toolrl.app.parts import Parts, start_parts
from toolrl.app.progress import Progress, begin, engines_turn, publish_weights, restore
from toolrl.app.run_folder import RunFolder, checkpoint_is_due
from toolrl.app.supervising import supervise, with_engine_gaps, without_hints
from toolrl.app.viewer.view import View
from toolrl.config import RunConfig
from toolrl.errors import RunError
from toolrl.monitors import batch_metrics
from toolrl.monitors.outcomes import StepOutcomes
from toolrl.monitors.reward_work import continuation_metrics
from toolrl.monitors.sandbox import sandbox_metrics
from toolrl.rewards import GroupRewards, RewardPipeline
from toolrl.tasks import AnswerChecker
from toolrl.trajectory import Trajectory

EXPIRE_EVERY_S = 2.0


class BatchLate(RunError):
    """No batch came within `loop.batch_deadline_s`; the message says for whom it waited."""


class NoSpread(RunError):
    """Group after group had equal rewards (`buffer.max_refills`): there is nothing to learn from these tasks."""


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
            if resume and folder.is_finished(config.loop.steps):
                view.note(f"nothing left to train: {config.loop.steps} steps are done; more with loop.steps=N")
                return folder.path
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
        setup = Setup.of(config, prepare_model(config))
        check_cold_start(config, setup.tasks)
        reference_sources.check(config, setup.tasks)
        reflecting.check(config)
        RewardPipeline(config.rewards, AnswerChecker(config.tasks))
        GroupRewards.of(config.rewards)
        MeasuredRewards.of(config, setup)
        if config.loop.eval_ood:
            ood.OodPlan.of(config, prepare_model(config))
    except BaseException:
        if is_new:
            shutil.rmtree(place, ignore_errors=True)
        raise


async def _train(config: RunConfig, folder: RunFolder, view: View, resume: bool) -> None:
    view.stage("starting Ray, the learner and the engines")
    with Ending(view.note) as ending:
        async with start_parts(config, folder) as parts:
            progress = await (restore(parts, view) if resume else begin(parts, view))
            await evaluate(parts, progress, view, out_of_distribution=config.loop.eval_ood)
            ending.in_training(progress.pausing)
            await _until_trained(train_policy(parts, progress, view), keep_rollouts_going(parts, progress))
            ending.in_training(None)
            if progress.step < config.loop.steps:
                view.note(
                    f"stopped after step {progress.step}; `toolrl train {config.name} --resume` goes on from there"
                )
                return
            await evaluate(parts, progress, view, out_of_distribution=config.loop.eval_ood)
            await parts.turns.learner()
            await parts.learner.export(str(folder.final))
            folder.mark_finished(progress.step)
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
    try:
        async with taking_orders(parts.folder.path, orders(parts, progress.pausing)), asyncio.TaskGroup() as tasks:
            tasks.create_task(parts.workers.watch())
            tasks.create_task(watch_leases())
            if parts.sandbox_hosts is not None:
                tasks.create_task(parts.sandbox_hosts.watch())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed


async def train_policy(parts: Parts, progress: Progress, view: View) -> None:
    """Trains until the last step, or the one after which somebody asked the run to stop."""
    config = parts.config
    format_state = parser_alone(config.rollout.parser, str(parts.folder.model)).format_state
    group_rewards = GroupRewards.of(config.rewards)
    outcomes = StepOutcomes(await parts.buffer.ledger.remote())
    guarding = await Guarding.start(parts, progress, view)
    while progress.step < config.loop.steps and not progress.pausing.stop_asked:
        await engines_turn(parts, progress, view)
        started = time.monotonic()
        batch = await progress.pausing.unless_stopped(next_batch(parts, progress))
        if batch is None:
            break
        groups = batch.trajectories()
        trajectories = [member for group in groups for member in group]
        waited = time.monotonic()
        await asyncio.to_thread(group_rewards.score, groups, guarding.controls.reward_weights)
        if parts.measured is not None:
            await parts.turns.learner()
            await parts.measured.score(parts.learner, trajectories, guarding.controls.reward_weights)
        uniform = outcomes.uniform_groups(await parts.buffer.ledger.remote(), config.loop.group_size)
        read = functools.partial(
            batch_metrics,
            trajectories,
            format_state=format_state,
            outcome_weight=config.rewards.weights.get("outcome", 1.0),
            dropped_groups=uniform,
        )
        if guarding.judges_batches and await guarding.rejects(batch.batch_id, read(learner_version=progress.version)):
            continue
        await parts.turns.learner()
        learnt = await learn(parts, groups)
        learnt |= await supervise(parts, progress.step + 1, groups)
        progress.step += 1
        await parts.buffer.ack.remote(batch.batch_id, progress.step, progress.version + 1)
        progress.batch_id = None
        trained = time.monotonic()
        await publish_weights(parts, progress, progress.version + 1, view)
        published = time.monotonic()
        turns = parts.turns.spent()
        metrics = {
            **read(learner_version=progress.version - 1),
            **learnt,
            **outcomes.since_last(await parts.buffer.ledger.remote()),
            "time/rollout_s": waited - started,  # how long the learner waited for its batch
            "time/learn_s": trained - waited - turns.get("time/sleep_s", 0.0),
            "time/publish_s": published - trained,
            **turns,
            **await gauges(parts),
        }
        metrics |= guarding.observe(metrics)
        view.step(progress.step, progress.version, metrics, trajectories)
        await guarding.act()
        if checkpoint_is_due(progress.step, config.loop):
            await guarding.checkpoint()
        if config.loop.eval_every_steps and progress.step % config.loop.eval_every_steps == 0:
            await evaluate(parts, progress, view)
    await guarding.checkpoint()


async def next_batch(parts: Parts, progress: Progress) -> Batch:
    """Waits for whole groups, none of them older than the staleness bound. Raises BatchLate or NoSpread."""
    loop = parts.config.loop
    batch: Batch | None = await parts.buffer.wait_for_batch.remote(
        "learner",
        loop.groups_per_step,
        progress.version,
        timeout_s=loop.batch_deadline_s,
        patience_s=loop.batch_deadline_s / 2,
        request=f"step {progress.step + 1} on version {progress.version}",
    )
    if batch is None and (why := await parts.buffer.no_spread.remote()) is not None:
        raise NoSpread(f"no batch for step {progress.step + 1}: {why}")
    if batch is None:
        raise BatchLate(
            f"no batch for step {progress.step + 1} in loop.batch_deadline_s={loop.batch_deadline_s:g} s: "
            f"{await parts.buffer.waiting_for.remote()}"
        )
    progress.batch_id = batch.batch_id
    return batch


async def learn(parts: Parts, groups: list[list[Trajectory]]) -> dict[str, float]:
    """What the learner knows of the batch, advantages from it, then the optimiser steps; returns the learner's metrics."""
    algorithm = parts.config.algorithm
    played = [member for group in groups for member in group]
    groups = without_hints(groups)
    members = [member for group in groups for member in group]
    await charge_kl(parts.learner, algorithm, members)
    evidence = await gather_evidence(parts.learner, algorithm.advantage.name, members, parts.hints)
    found = batch_advantages(algorithm.advantage.name, groups, evidence=evidence, **algorithm.advantage.options)
    sequences = sequences_from(
        members,
        found.advantages,
        per_token=found.per_token,
        void_turns=algorithm.void_turns,
        truncated=algorithm.truncated,
        outcome_weight=parts.config.rewards.weights.get("outcome", 1.0),
    )
    if evidence is not None and found.targets is not None:
        sequences = with_targets(sequences, members, evidence, found.targets)
    sequences = await with_engine_gaps(parts.learner, played, sequences)
    return await parts.learner.train(sequences)


async def evaluate(parts: Parts, progress: Progress, view: View, *, out_of_distribution: bool = False) -> None:
    """Plays the held-out tasks, with `out_of_distribution` under the variants of `eval.ood` too, and keeps the table."""
    config, model = parts.config, parts.folder.model
    if config.tasks.held_out_tasks == 0:
        return
    await engines_turn(parts, progress, view)
    view.stage("playing the held-out tasks")
    temperature = config.loop.eval_temperature
    at = config.rollout.temperature if temperature is None else temperature

    async def play(settings: RunConfig | None, tasks: int) -> list[Trajectory]:
        return await parts.workers.evaluate(tasks, config.loop.eval_samples, at, settings)

    table = ood.table_of(await play(None, config.tasks.held_out_tasks), config, model)
    if out_of_distribution:
        view.stage("playing them out of distribution")
        table["ood"] = await ood.compare(await asyncio.to_thread(ood.OodPlan.of, config, model), table, play, model)
    progress.evaluations.append(table)
    view.evaluated(progress.step, table)


async def gauges(parts: Parts) -> dict[str, float]:
    """Queue depths and the workers' own gauges."""
    stats = await parts.workers.stats()
    hosts = [] if parts.sandbox_hosts is None else await parts.sandbox_hosts.stats()
    return {
        **{f"buffer/{name}": float(value) for name, value in (await parts.buffer.stats.remote()).items()},
        "worker/count": float(len(parts.workers.members)),
        "worker/running_episodes": float(sum(each["running"] for each in stats)),
        "worker/parked_episodes": float(sum(each["parked"] for each in stats)),
        "worker/asleep": float(sum(each["asleep"] for each in stats)),
        "worker/loop_lag_s": max((each["loop_lag_s"] for each in stats), default=0.0),
        **{f"worker/{name}": sum(each[name] for each in stats) for name in ("processor_s", "engine_processor_s")},
        "worker/machine_processor_s": max((each["machine_processor_s"] for each in stats), default=0.0),
        **parts.workers.channel.gauges(),
        **continuation_metrics(stats),
        **({} if parts.reward_workers is None else parts.reward_workers.metrics()),
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
