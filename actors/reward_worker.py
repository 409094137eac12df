"""A reward worker: a Ray actor with resources of its own that scores finished trajectories with a process reward model and
delivers the credit of their turns as late rewards. Rollouts never wait for it. See `toolrl.rewards.prm`.

Invariants:
- It pulls from the replay buffer like any reward worker. What it claimed and did not deliver is claimed by another when the
  claim is over.
- A trajectory that the model cannot score costs its own reward alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import ray
from ray.exceptions import RayError

from toolrl.rewards.prm import NAME, PrmOptions, StepScorer, step_scorer
from toolrl.rewards.step_scores import credit
from toolrl.trajectory import Trajectory

log = logging.getLogger(__name__)

WAIT_S = 10.0
CLAIM_S = 60.0
AGAIN_S = 1.0


class RewardWorker:
    """The actor's body. Create, `start()`, then `serve()`."""

    def __init__(self, options: PrmOptions, model_dir: str, buffer: Any) -> None:
        self.options = options
        self.model_dir = model_dir
        self.buffer = buffer

    async def start(self) -> int:
        """Loads the model; returns the process id. Raises UserError, see `step_scorer`."""
        self.scorer: StepScorer = await asyncio.to_thread(step_scorer, self.options, self.model_dir)
        return os.getpid()

    async def serve(self) -> None:
        """Scores what waits, until the actor ends."""
        while True:
            try:
                claimed = await self.buffer.wait_for_unrewarded.remote(
                    NAME, limit=self.options.batch_size, claim_s=CLAIM_S, timeout_s=WAIT_S
                )
                trajectories = [awaited.trajectory for awaited in claimed]
                for awaited, scores in zip(claimed, await self._scored(trajectories), strict=True):
                    if scores is not None:
                        value = credit(scores[1:], self.options.aggregate, self.options.per, scores[0])
                        answer = await self.buffer.deliver_reward.remote(awaited.trajectory_id, NAME, value)
                        if answer.status != "accepted":
                            log.info("reward %s of %s: %s: %s", NAME, awaited.trajectory_id, answer.status, answer.why)
            except RayError as error:  # the buffer starts again: what was claimed can be claimed once more
                log.warning("reward worker: %s", error)
                await asyncio.sleep(AGAIN_S)

    async def _scored(self, trajectories: list[Trajectory]) -> list[list[float | None] | None]:
        """The scores of each; None where the model fails on it."""
        if not trajectories:
            return []
        try:
            return list(await asyncio.to_thread(self.scorer.score, trajectories))
        except Exception:
            log.exception("reward %s: the model failed on %d trajectories", NAME, len(trajectories))
        if len(trajectories) == 1:
            return [None]
        return [scores for each in trajectories for scores in await self._scored([each])]


def start_reward_worker(name: str, options: PrmOptions, model_dir: str, buffer: Any) -> Any:
    """Creates the Ray actor; the caller awaits its `start`."""
    on_gpu = options.device == "cuda"
    actor = ray.remote(RewardWorker).options(
        name=name,
        num_cpus=1 if on_gpu else options.cpu_threads,
        num_gpus=options.gpus if on_gpu else 0,
        max_concurrency=8,
        runtime_env={
            "env_vars": {
                "OMP_NUM_THREADS": str(options.cpu_threads),
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
            }
        },
    )
    return actor.remote(options, model_dir, buffer)
