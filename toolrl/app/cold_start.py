"""Cold start: supervised training on interaction-dense traces, with the run's own learner, before the first rollout.

`write_traces` makes them (or reads ready-made ones), `train_on_traces` learns them. The loss is on policy tokens only,
end tokens included, so that the policy learns when to stop; what a tool said is context.

Invariant: batch b of step s depends on the seed and the number of traces alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from learner.schedule import learning_rate
from learner.sequence import TrainSequence, sequences_from
from toolrl import trajectory_parquet
from toolrl.app.cold_start_dense import why_not_dense
from toolrl.app.cold_start_traces import FIRST_TASK, TraceMaker
from toolrl.app.run_folder import RunFolder
from toolrl.app.step_solvers import check_families
from toolrl.config import ColdStartConfig, RunConfig
from toolrl.errors import UserError
from toolrl.tasks import TaskSource
from toolrl.trajectory import Trajectory

TRACES = "traces.parquet"
# The rate falls to 0, so that the shares of mistakes are learnt and not left to what the last batches happened to hold.
SCHEDULE = "linear"
SHOWN_EVERY = 50


class Supervised(Protocol):
    """The part of `actors.learner_group.LearnerGroup` that a cold start needs."""

    async def supervised(self, sequences: list[TrainSequence], learning_rate: float) -> dict[str, float]: ...

    async def reset_optimizer(self) -> None: ...


class Watched(Protocol):
    """The part of a run's view that a cold start speaks to."""

    def stage(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class ColdStartReport:
    """What a cold start did."""

    traces: int
    losses: list[float]  # [steps] mean negative log-likelihood of a policy token
    traces_s: float
    training_s: float

    def __str__(self) -> str:
        first, last = (f"{self.losses[at]:.2f}" if self.losses else "-" for at in (0, -1))
        return f"{len(self.losses)} steps in {self.training_s:.0f} s, loss {first} to {last}"


async def cold_start(config: RunConfig, folder: RunFolder, learner: Supervised, view: Watched) -> ColdStartReport:
    """Traces into `folder`, `cold_start.steps` optimiser steps on them, a fresh optimiser for what comes after.

    Raises:
        NoSolver: no traces can be generated for one of the task families.
        UserError: `cold_start.traces_path` holds nothing to learn from.
    """
    settings = config.cold_start
    view.stage(f"cold start: running the programs of {settings.traces} traces")
    started = time.monotonic()
    traces = await write_traces(config, folder.model, folder.cold_start)
    written = time.monotonic()
    view.note(f"cold start: {_kinds(traces)} in {written - started:.0f} s")

    def on_step(step: int, loss: float) -> None:
        if step % SHOWN_EVERY == 0 or step == settings.steps:
            view.stage(f"cold start: step {step} of {settings.steps}, loss {loss:.2f}")

    losses = await train_on_traces(learner, traces, settings, config.seed, on_step)
    await learner.reset_optimizer()
    report = ColdStartReport(len(traces), losses, written - started, time.monotonic() - written)
    view.note(f"cold start: {report}")
    return report


def _kinds(traces: Sequence[Trajectory]) -> str:
    kinds = Counter(str(trace.metadata.get("kind", "given")) for trace in traces)
    return f"{len(traces)} traces ({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})"


async def write_traces(config: RunConfig, model_dir: Path, folder: Path) -> list[Trajectory]:
    """The traces of the run: those of `cold_start.traces_path`, else generated ones, kept in `folder`/traces.parquet.

    Raises:
        NoSolver: no traces can be generated for one of the task families.
        UserError: the file given holds none that can be trained on.
    """
    given = config.cold_start.traces_path
    if given is not None:
        traces = await asyncio.to_thread(read_traces, Path(given))
        return _dense(traces, config.cold_start, given) if config.cold_start.dense else traces
    traces = await generate_traces(config, model_dir)
    await asyncio.to_thread(keep_traces, folder, traces)
    return traces


def _dense(given: list[Trajectory], settings: ColdStartConfig, path: str) -> list[Trajectory]:
    """The given traces in which enough calls ran, each with something new. Raises UserError without any."""
    kept = [trace for trace in given if why_not_dense(trace, settings.min_calls) is None]
    if not kept:
        raise UserError(
            f"cold_start.dense: none of the {len(given)} traces of {path} has cold_start.min_calls={settings.min_calls} calls "
            "that ran and changed something; lower it, set cold_start.dense=false, or give others"
        )
    return kept


def check_cold_start(config: RunConfig, source: TaskSource) -> None:
    """Whether the dense traces that are asked for can be made of the run's tasks; nothing is run for it.

    Raises:
        NoSolver: names the task family of which they cannot, and what to do.
    """
    settings = config.cold_start
    if settings.steps and settings.dense and settings.traces_path is None:
        check_families(config, source, FIRST_TASK)


def keep_traces(folder: Path, traces: list[Trajectory]) -> None:
    """Writes them to `folder`/traces.parquet, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (TRACES + ".partial")
    trajectory_parquet.write(partial, traces)
    partial.replace(folder / TRACES)


async def generate_traces(config: RunConfig, model_dir: Path, first_task: int = FIRST_TASK) -> list[Trajectory]:
    """Runs the programs of `cold_start.traces` traces in the run's sandbox, on its tasks from `first_task` on; see
    `cold_start_traces`."""
    from actors.worker_setup import Setup

    setup = await asyncio.to_thread(Setup.of, config, model_dir)
    async with setup.sandbox as pool:
        return await TraceMaker(config, setup.tokenizer, setup.chat, setup.parser, setup.tasks).make(pool, first_task)


def read_traces(path: Path, setting: str = "cold_start.traces_path") -> list[Trajectory]:
    """Traces of a Parquet file: a cold start's, or trajectories that a run kept. Raises UserError without any, naming the
    setting that asked for it."""
    if not path.is_file():
        raise UserError(f"{setting}: there is no file {path}; `toolrl cold-start` writes one")
    traces = [trace for trace in trajectory_parquet.read(path) if trace.outcome is not None and trace.outcome.trained]
    if not traces:
        raise UserError(f"{setting}: {path} holds no finished trajectory to learn from")
    return traces


async def train_on_traces(
    learner: Supervised,
    traces: Sequence[Trajectory],
    settings: ColdStartConfig,
    seed: int,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """[steps] the loss of each step."""
    sequences = sequences_from(traces, [[0.0] * len(trace.policy_turns) for trace in traces])
    losses = []
    for step, batch in enumerate(batches(len(sequences), settings.batch_size, settings.steps, seed)):
        rate = learning_rate(
            step,
            base=settings.learning_rate,
            schedule=SCHEDULE,
            warmup_steps=settings.warmup_steps,
            total_steps=settings.steps,
        )
        metrics = await learner.supervised([sequences[index] for index in batch], rate)
        losses.append(metrics["loss/supervised"])
        if on_step is not None:
            on_step(step + 1, losses[-1])
    return losses


def batches(count: int, batch_size: int, steps: int, seed: int) -> Iterator[list[int]]:
    """`steps` batches of indices below `count`: shuffled epochs one after the other, each index once an epoch."""
    waiting: list[int] = []
    epoch = 0
    for _ in range(steps):
        while len(waiting) < batch_size:
            order = list(range(count))
            random.Random(f"{seed}/cold-start/epoch/{epoch}").shuffle(order)
            waiting += order
            epoch += 1
        yield waiting[:batch_size]
        waiting = waiting[batch_size:]
