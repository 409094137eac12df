"""Monte-Carlo values of steps: a rollout worker plays finished episodes on from their turn boundaries, and sees how often they
are solved from there. See `toolrl.rewards.monte_carlo`.

Invariants:
- A continuation is a measurement. It is in no group, is never sent to the buffer and is no sample of its account; it is
  counted in `counts`.
- Continuations have places of their own: no episode of a ticket waits for one, and no worker plays more than `concurrency`.
- A reward is delivered before its deadline from what was played by then, whatever was not.
- A worker that dies or leaves loses the work, not the reward: its claims end and another worker begins anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayError

from actors.continuation import prefix_of
from actors.engine import EngineDied
from actors.episode import EpisodeRunner
from actors.parking import Slots
from actors.replay import AwaitedReward
from actors.replay.records import sample_seed, task_index_of
from actors.running_episodes import ENGINE_DIED
from actors.seat import Seat
from toolrl.config import Named, RewardConfig, RunConfig
from toolrl.config_model_rewards import options_in_effect
from toolrl.rewards import RewardPipeline
from toolrl.rewards.monte_carlo import NAME, MonteCarloOptions, chosen_boundaries
from toolrl.rewards.step_scores import credit, values_along
from toolrl.tasks import AnswerChecker, Task, TaskSource
from toolrl.trajectory import Trajectory

log = logging.getLogger(__name__)

WAIT_S = 1.0
SHARE_OF_DEADLINE = 0.8  # of the time that is left: what is played by then counts
CLAIM_S = 60.0
REMEMBERED_GROUPS = 256


@dataclass
class ContinuationCounts:
    """Since the worker began."""

    continuations: int = 0
    continuation_tokens: int = 0  # sampled, without their prefixes
    continuations_unscored: int = 0  # they could not be taken up, the verifier failed, or their time was over


class MonteCarlo:
    """`run()` beside the worker's episodes."""

    def __init__(
        self,
        episodes: EpisodeRunner,
        tasks: TaskSource,
        buffer: Any,
        checker: AnswerChecker,
        options: MonteCarloOptions,
        config: RunConfig,
    ) -> None:
        self.options = options
        self.counts = ContinuationCounts()
        self.tasks, self.buffer, self.seed = tasks, buffer, config.seed
        self._leaving = asyncio.Event()
        self._prompts: dict[str, asyncio.Task[float | None]] = {}  # by group
        self.slots = Slots(options.concurrency, config.rollout.park_after_s)
        outcome = options_in_effect(config.rewards, "outcome") or {}
        self.outcome = RewardPipeline(
            RewardConfig([Named("outcome", outcome)], deadline_s=config.rewards.deadline_s), checker
        )
        self.runner = EpisodeRunner(
            episodes.engine,
            episodes.chat,
            episodes.parser,
            episodes.toolbox,
            self.outcome,
            replace(config.rollout, on_changed_replay="refuse"),  # another state says nothing about this prefix
            tokenizer=episodes.tokenizer,
            answer=episodes.answer,
        )

    @classmethod
    def of(
        cls, config: RunConfig, episodes: EpisodeRunner, tasks: TaskSource, buffer: Any, checker: AnswerChecker
    ) -> MonteCarlo | None:
        """None where the config names no `monte_carlo`."""
        options = options_in_effect(config.rewards, NAME)
        return None if options is None else cls(episodes, tasks, buffer, checker, MonteCarloOptions(**options), config)

    async def run(self, leaving: asyncio.Event) -> None:
        """Works out what waits for this reward; begins nothing more once the worker is `leaving`."""
        self._leaving = leaving
        try:
            await self._work()
        finally:
            for prompt in self._prompts.values():
                prompt.cancel()

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as rewards:
            while not self._leaving.is_set():
                if not await self.slots.room(1, timeout_s=WAIT_S):
                    continue
                try:
                    claimed = await self.buffer.wait_for_unrewarded.remote(
                        NAME, limit=1, claim_s=CLAIM_S, timeout_s=WAIT_S
                    )
                except RayError as error:
                    log.warning("no trajectory to continue: %s", error)
                    await asyncio.sleep(WAIT_S)
                    continue
                for awaited in claimed:
                    rewards.create_task(self._reward(awaited))

    async def _reward(self, awaited: AwaitedReward) -> None:
        try:
            start, values = await self.values(awaited.trajectory, within_s=SHARE_OF_DEADLINE * awaited.seconds_left)
            score = credit(values, self.options.aggregate, self.options.per, start)
            answer = await self.buffer.deliver_reward.remote(awaited.trajectory_id, NAME, score)
            if answer.status != "accepted":
                log.info("reward %s of %s: %s: %s", NAME, awaited.trajectory_id, answer.status, answer.why)
        except EngineDied:
            if self._leaving.is_set():  # the worker stops, and its engine with it
                return
            log.exception("the engine died under a continuation of %s", awaited.trajectory_id)
            os._exit(ENGINE_DIED)  # as under an episode
        except Exception:  # costs this one reward: somebody tries again when the claim is over, or its deadline passes
            log.exception("reward %s of %s", NAME, awaited.trajectory_id)

    async def values(self, trajectory: Trajectory, within_s: float) -> tuple[float | None, list[float | None]]:
        """(value of the prompt, [n_policy_turns] the value after each of its turns); None where it was not measured.

        Raises:
            EngineDied: see `EpisodeRunner.run`.
        """
        task_index = task_index_of(trajectory.group_id)
        task = self.tasks.task(task_index)
        seed = sample_seed(self.seed, task_index, trajectory.sample_index)
        start = self._value_of_prompt(trajectory, task, task_index)
        jobs = {
            asyncio.create_task(self._continued(trajectory, task, done, number, sample_seed(seed, done, number))): done
            for done in chosen_boundaries(trajectory, self.options.boundaries, self.options.choose)
            for number in range(self.options.continuations)
        }
        try:
            await asyncio.wait([start, *jobs], timeout=within_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        branches: list[list[float]] = [[] for _ in trajectory.policy_turns[:-1]]
        for job, done in jobs.items():
            branches[done - 1] += self._scored([job])
        known = start.done() and not start.cancelled()
        return start.result() if known else None, values_along(branches, await self._score(trajectory, task))

    def _value_of_prompt(self, trajectory: Trajectory, task: Task, task_index: int) -> asyncio.Task[float | None]:
        """Of its group's, which is measured once, twice as often as a step's: all of its members are compared with it."""
        if trajectory.group_id not in self._prompts:
            while len(self._prompts) >= REMEMBERED_GROUPS:
                self._prompts.pop(next(iter(self._prompts))).cancel()
            shared = replace(trajectory, id=trajectory.group_id)
            measuring = asyncio.create_task(self._mean_from_prompt(shared, task, task_index))
            measuring.add_done_callback(
                lambda ended: ended.cancelled() or ended.exception()
            )  # whoever asks hears of it
            self._prompts[trajectory.group_id] = measuring
        return self._prompts[trajectory.group_id]

    async def _mean_from_prompt(self, trajectory: Trajectory, task: Task, task_index: int) -> float | None:
        seeds = [sample_seed(self.seed, task_index, -1 - number) for number in range(2 * self.options.continuations)]
        jobs = [asyncio.create_task(self._continued(trajectory, task, 0, *each)) for each in enumerate(seeds)]
        try:
            await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
        scores = self._scored(jobs)
        return sum(scores) / len(scores) if scores else None

    def _scored(self, jobs: Sequence[asyncio.Task[float | None]]) -> list[float]:
        """The scores of those that have one; the others are counted. Raises what one of them raised."""
        found = [None if job.cancelled() else job.result() for job in jobs]
        self.counts.continuations_unscored += found.count(None)
        return [score for score in found if score is not None]

    async def _continued(self, trajectory: Trajectory, task: Task, done: int, number: int, seed: int) -> float | None:
        """The score of one episode that goes on after `done` policy turns; None where it has none."""
        seat = Seat(f"{trajectory.id}-after{done}", number, seed)
        prefix = prefix_of(trajectory, done)
        async with self.slots.slot() as slot:
            played = await self.runner.run(task, seat, progress=prefix, slot=slot)
        self.counts.continuations += 1
        self.counts.continuation_tokens += sum(len(turn.token_ids) for turn in played.policy_turns[done:])
        return played.rewards.get("outcome")

    async def _score(self, trajectory: Trajectory, task: Task) -> float | None:
        """The trajectory's own, as its continuations are scored."""
        bare = replace(trajectory, rewards={}, metadata={})
        await self.outcome.score(bare, task)
        return bare.rewards.get("outcome")
