"""Held-out tasks on a rollout worker's engine: under the run's own settings, or under others that change no engine.

Other settings get a chat format, parser, toolbox and tasks of their own; engine, interpreter pool and verifier processes are
the worker's, so that nothing is started.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from actors.episode import EpisodeRunner, GeneratesTokens
from actors.parking import Slots
from actors.seat import Seat
from actors.worker_setup import Setup
from toolrl.config import RunConfig
from toolrl.rewards import RewardPipeline
from toolrl.tasks import AnswerChecker, TaskSource
from toolrl.trajectory_codec import encode


def episode_runner(engine: GeneratesTokens, setup: Setup, checker: AnswerChecker, config: RunConfig) -> EpisodeRunner:
    """Runs episodes as the settings say, on this engine."""
    return EpisodeRunner(
        engine,
        setup.chat,
        setup.parser,
        setup.toolbox,
        RewardPipeline(config.rewards, checker),
        config.rollout,
        tokenizer=setup.tokenizer,
        answer=config.tasks.answer,
    )


class HeldOut:
    """The held-out tasks of one worker."""

    def __init__(
        self,
        engine: GeneratesTokens,
        setup: Setup,
        episodes: EpisodeRunner,
        checker: AnswerChecker,
        config: RunConfig,
        model_dir: str | Path,
    ) -> None:
        self._engine = engine
        self._setup = setup
        self._episodes = episodes
        self._checker = checker
        self._config = config
        self._model_dir = model_dir

    async def play(
        self, indices: list[int], samples: int, temperature: float, settings: RunConfig | None = None
    ) -> list[bytes]:
        """Plays tasks `indices`, `samples` times each; returns encoded trajectories.

        Args:
            settings: in the place of the worker's. A sample keeps its seeds, so that two settings can be compared.

        Raises:
            UserError: other settings that cannot work.
        """
        async with self._stage(settings) as (episodes, tasks):
            held_out = await asyncio.to_thread(tasks.held_out)
            slots = Slots(self._config.rollout.concurrency, self._config.rollout.park_after_s)

            async def one(index: int, sample: int) -> bytes:
                async with slots.slot() as slot:
                    seat = Seat(f"eval-{index}", sample, seed=index * samples + sample)
                    return encode(await episodes.run(held_out[index], seat, temperature=temperature, slot=slot))

            return list(await asyncio.gather(*(one(i, s) for i in indices for s in range(samples))))

    @contextlib.asynccontextmanager
    async def _stage(self, settings: RunConfig | None) -> AsyncIterator[tuple[EpisodeRunner, TaskSource]]:
        if settings is None:
            yield self._episodes, self._setup.tasks
            return
        setup = await asyncio.to_thread(Setup.of, settings, self._model_dir, self._setup.sandbox)
        try:
            for verifier in setup.tasks.verifiers:
                await self._checker.load(verifier)
            yield episode_runner(self._engine, setup, self._checker, settings), setup.tasks
        finally:
            await setup.toolbox.close()
