"""Where small runs are made: a real cold start, real episodes in real boxes, the real learner, all in this process.

What the loop of `toolrl train` spreads over Ray actors is called here step by step, so that a plant can put its hand
between two steps. One learner serves every run: each begins from the checkpoint of the cold start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from actors.episode import EpisodeRunner
from actors.seat import Seat
from actors.worker_setup import Setup
from benchmarks.collapses.sampler import TorchEngine
from learner.sequence import TrainSequence, sequences_from
from toolrl.algorithms.batch_advantages import batch_advantages
from toolrl.app.cold_start import TRACES, read_traces, train_on_traces, write_traces
from toolrl.app.tiny_model import write_tiny_model
from toolrl.config import RunConfig
from toolrl.monitors import batch_metrics
from toolrl.monitors.control_tokens import ControlTokens
from toolrl.rewards import RewardPipeline
from toolrl.tasks import AnswerChecker
from toolrl.trajectory import Trajectory

MODEL = "model"


class Laboratory:
    """One policy, its learner and what plays its episodes. Made by `laboratory`."""

    def __init__(
        self, config: RunConfig, setup: Setup, episodes: EpisodeRunner, engine: TorchEngine, rank: Any
    ) -> None:
        self.config, self.setup, self.episodes, self.engine, self.rank = config, setup, episodes, engine, rank
        self.traces: list[Trajectory] = []
        self._first_task = 0
        self._start = Path()

    async def cold_start(self, folder: Path) -> None:
        """Trains the policy that every run begins with; one that lies in `folder` already is taken as it is."""
        self._start, traces = folder / "cold-start", folder / TRACES
        if traces.is_file() and self._start.is_dir():
            self.traces = read_traces(traces)
            return
        self.traces = await write_traces(self.config, folder / MODEL, folder)
        await train_on_traces(self, self.traces, self.config.cold_start, self.config.seed)
        self.rank.reset_optimizer()
        self.rank.save_checkpoint(self._start)

    async def supervised(self, sequences: list[TrainSequence], learning_rate: float) -> dict[str, float]:
        """One supervised step; with it a laboratory is what `train_on_traces` trains."""
        metrics: dict[str, float] = self.rank.supervised_batch(sequences, learning_rate)
        return metrics

    async def reset_optimizer(self) -> None:
        self.rank.reset_optimizer()

    def begin(self, seed: int, lr_factor: float) -> None:
        """A new run from the cold start: other tasks, other samples."""
        self.rank.load_checkpoint(self._start)
        self.rank.set_controls(lr_factor=lr_factor)
        self._first_task = seed * 100_000
        self.publish(0)

    def publish(self, version: int) -> None:
        self.engine.load(self.rank.weight_source(), version)

    async def play(self, step: int) -> list[list[Trajectory]]:
        """The groups of one batch, sampled from the weights as they are."""
        loop = self.config.loop
        first = self._first_task + step * loop.groups_per_step
        tasks = [self.setup.tasks.task(first + group) for group in range(loop.groups_per_step)]
        members = [
            self.episodes.run(task, Seat(f"{first + group}", sample, seed=(first + group) * loop.group_size + sample))
            for group, task in enumerate(tasks)
            for sample in range(loop.group_size)
        ]
        played = await asyncio.gather(*members)
        return [list(played[at : at + loop.group_size]) for at in range(0, len(played), loop.group_size)]

    def sequences(self, groups: list[list[Trajectory]]) -> list[TrainSequence]:
        """What the learner gets of a batch."""
        advantage = self.config.algorithm.advantage
        found = batch_advantages(advantage.name, groups, evidence=None, **advantage.options)
        members = [member for group in groups for member in group]
        return sequences_from(members, found.advantages, per_token=found.per_token)

    def metrics(self, groups: list[list[Trajectory]], version: int) -> dict[str, float]:
        """Of the batch alone."""
        members = [member for group in groups for member in group]
        return batch_metrics(members, learner_version=version, format_state=self.setup.parser.format_state)


@contextlib.asynccontextmanager
async def laboratory(config: RunConfig, folder: Path) -> AsyncIterator[Laboratory]:
    """Starts everything and cold-starts the policy; `folder` keeps model, traces and checkpoint."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from transformers import AutoModelForCausalLM

    from learner.rank import LearnerRank
    from learner.settings import RankSettings

    model_dir = folder / MODEL
    write_tiny_model(model_dir, config.seed)
    setup = await asyncio.to_thread(Setup.of, config, model_dir)
    settings = RankSettings(
        model_dir=str(model_dir),
        learner=config.learner,
        algorithm=config.algorithm,
        seed=config.seed,
        total_steps=config.loop.steps * config.learner.updates_per_batch,
        max_response_tokens=config.rollout.max_response_tokens,
        monitors=config.monitors,
        control=ControlTokens.of(setup.tokenizer, setup.chat, setup.parser),
    )
    rank = LearnerRank(settings, port=_free_port())
    engine = TorchEngine(AutoModelForCausalLM.from_pretrained(model_dir))
    async with setup.sandbox, AnswerChecker(config.tasks) as checker:
        episodes = EpisodeRunner(
            engine,
            setup.chat,
            setup.parser,
            setup.toolbox,
            RewardPipeline(config.rewards, checker),
            config.rollout,
            tokenizer=setup.tokenizer,
            answer=config.tasks.answer,
        )
        made = Laboratory(config, setup, episodes, engine, rank)
        await made.cold_start(folder)
        try:
            yield made
        finally:
            await setup.toolbox.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
