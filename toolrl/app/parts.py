"""The live parts of a run: Ray, the replay buffer, the learner, the rollout workers; started together, stopped together.

Invariant: leaving the context leaves no actor, no engine process and no container of this run behind, however it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ray

from actors.learner_group import LearnerGroup
from actors.node_groups import fits
from actors.replay import AwaitedReward, ReplaySettings, RewardAnswer
from actors.replay import actor as replay
from actors.reward_worker_group import RewardWorkerGroup
from actors.sandbox_host_group import SandboxHostGroup
from actors.weights.path import WeightPath
from actors.worker_pool import WorkerPool
from actors.worker_setup import Setup, control_tokens, hosted, sandbox_config
from toolrl import placement
from toolrl.algorithms.registries import advantage_registry, needed_evidence
from toolrl.app import reference_sources
from toolrl.app.answer_hints import AnswerHints
from toolrl.app.measured_rewards import MeasuredRewards
from toolrl.app.ray_start import start_ray
from toolrl.app.reflecting import Reflection
from toolrl.app.reward_callback import reward_callback
from toolrl.app.run_folder import RunFolder
from toolrl.app.turns import Turns
from toolrl.config import RunConfig
from toolrl.config_model_rewards import MEASURED, options_in_effect
from toolrl.rewards.prm import PrmOptions
from toolrl.weight_transport import transport_of

log = logging.getLogger(__name__)

BUFFER_DEADLINE_S = 60.0  # of an answer to who posts a reward


@dataclass(frozen=True)
class BufferRewards:
    """The replay buffer as `reward_callback` wants it: asked from threads."""

    buffer: Any

    def deliver(self, trajectory_id: str, name: str, value: Any) -> RewardAnswer:
        answer: RewardAnswer = ray.get(
            self.buffer.deliver_reward.remote(trajectory_id, name, value), timeout=BUFFER_DEADLINE_S
        )
        return answer

    def claim(self, name: str, *, limit: int, claim_s: float, timeout_s: float) -> list[AwaitedReward]:
        asked = self.buffer.wait_for_unrewarded.remote(name, limit=limit, claim_s=claim_s, timeout_s=timeout_s)
        found: list[AwaitedReward] = ray.get(asked, timeout=timeout_s + BUFFER_DEADLINE_S)
        return found


@dataclass
class Parts:
    """What the loop works with."""

    config: RunConfig
    folder: RunFolder
    on_gpu: bool
    buffer: Any  # Ray handle of actors.replay.ReplayBuffer
    learner: LearnerGroup
    workers: WorkerPool
    sandbox_hosts: SandboxHostGroup | None  # with placement.sandbox=hosts
    hints: AnswerHints | None = None  # for an advantage whose teacher knows the answers
    reward_workers: RewardWorkerGroup | None = None  # for the reward `prm`
    measured: MeasuredRewards | None = None  # for rewards that ask the learner
    references: Any = None  # Ray handle of toolrl.supervision.References, where something asks for them
    reflection: Reflection | None = None  # with a critic of failed trajectories
    turns: Turns = field(init=False)  # of learner and workers

    def __post_init__(self) -> None:
        self.turns = Turns(self.learner, self.workers, shared=placement.takes_turns(self.config))

    @cached_property
    def weights(self) -> WeightPath:
        """From the learner to the workers; it begins with the first publication."""
        transport = transport_of(self.config, "cuda" if self.on_gpu else "cpu")
        return WeightPath(self.learner, self.workers, transport, checksum=self.config.weights.checksum)


@contextlib.asynccontextmanager
async def sandbox_hosts(config: RunConfig) -> AsyncIterator[SandboxHostGroup | None]:
    """The run's sandbox hosts while the context lasts; None where the workers have their own pools, or need none."""
    if not hosted(config):
        yield None
        return
    group = await SandboxHostGroup.start(sandbox_config(config), config.placement.sandbox_hosts)
    try:
        yield group
    finally:
        await group.stop()


async def start_learner(config: RunConfig, folder: RunFolder, *, on_gpu: bool) -> LearnerGroup:
    """The learner, told which tokens steer its model. Where engines share its memory the first turn is theirs."""
    control = await asyncio.to_thread(control_tokens, config, folder.model)
    learner = await LearnerGroup.start(config, str(folder.model), on_gpu=on_gpu, control=control)
    if placement.takes_turns(config):
        await learner.make_room()
    return learner


@contextlib.asynccontextmanager
async def start_parts(config: RunConfig, folder: RunFolder) -> AsyncIterator[Parts]:
    """Starts everything at once (engines take the longest) and stops everything at the end. Engines that share the learner's
    memory start after it: they measure what is free."""
    start_ray(config)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(ray.shutdown)
        available = ray.cluster_resources()
        plan = placement.plan(config, available)
        on_gpu = plan.device == "cuda"
        if config.placement.ray_address:
            await fits(plan)
        name = f"{config.name}/replay"
        buffer = await asyncio.to_thread(replay.start, name, folder.ledger, ReplaySettings.of(config))
        stack.callback(replay.stop, name)
        late = config.rewards.late
        if late.source == "http":
            stack.enter_context(reward_callback(BufferRewards(buffer), folder.path, late.http_host, late.http_port))
        hosts = await stack.enter_async_context(sandbox_hosts(config))
        learner = asyncio.create_task(start_learner(config, folder, on_gpu=on_gpu))
        stack.push_async_callback(_stop, learner)
        ranks = (await learner).places if placement.takes_turns(config) else None
        references = reference_sources.start(config)
        workers = asyncio.create_task(
            WorkerPool.start(config, str(folder.model), buffer, references, on_gpu=on_gpu, ranks=ranks)
        )
        stack.push_async_callback(_stop, workers)
        reward_workers = asyncio.create_task(start_reward_workers(config, folder, buffer))
        stack.push_async_callback(_stop, reward_workers)
        hints = await asyncio.to_thread(answer_hints, config, folder)
        measured = await asyncio.to_thread(measured_rewards, config, folder)
        reflection = await stack.enter_async_context(Reflection.started(config, folder.model))
        await asyncio.gather(learner, workers, reward_workers)
        yield Parts(
            config,
            folder,
            on_gpu,
            buffer,
            learner.result(),
            workers.result(),
            hosts,
            hints=hints,
            reward_workers=reward_workers.result(),
            measured=measured,
            references=references,
            reflection=reflection,
        )


async def start_reward_workers(config: RunConfig, folder: RunFolder, buffer: Any) -> RewardWorkerGroup | None:
    """The workers of the reward `prm`, if it is one of the run's."""
    options = options_in_effect(config.rewards, "prm")
    if options is None:
        return None
    return await RewardWorkerGroup.start(config.name, PrmOptions(**options), str(folder.model), buffer)


def measured_rewards(config: RunConfig, folder: RunFolder) -> MeasuredRewards | None:
    """The rewards that ask the learner, if there are any."""
    named = any(part.name in MEASURED for part in config.rewards.components)
    return MeasuredRewards.of(config, Setup.of(config, folder.model)) if named else None


def answer_hints(config: RunConfig, folder: RunFolder) -> AnswerHints | None:
    """The tasks' answers as a teacher reads them, where the advantage needs a teacher."""
    needed = needed_evidence(advantage_registry.get(config.algorithm.advantage.name))
    return AnswerHints.of(config, folder.model) if needed == "teacher" else None


async def _stop(starting: asyncio.Task[Any]) -> None:
    """Stops what a start gave, or the start itself when the other part's failed first."""
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None and starting.result() is not None:
        await starting.result().stop()
