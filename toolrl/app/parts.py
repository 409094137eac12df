"""The live parts of a run: Ray, the replay buffer, the learner, the rollout workers; started together, stopped together.

Invariant: leaving the context leaves no actor, no engine process and no container of this run behind, however it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import ray

from actors.learner_group import LearnerGroup
from actors.replay import ReplaySettings
from actors.replay import actor as replay
from actors.sandbox_host_group import SandboxHostGroup
from actors.worker_pool import WorkerPool
from actors.worker_setup import hosted, sandbox_config
from toolrl import placement
from toolrl.app.run_folder import RunFolder
from toolrl.config import RunConfig

log = logging.getLogger(__name__)


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


def start_ray(config: RunConfig) -> None:
    """Joins the cluster at `placement.ray_address`, or starts a local one that ends with this process.

    Raises:
        toolrl.placement.PlacementError: the cluster lacks what the config asks for; names it.
    """
    common = {"namespace": "toolrl", "log_to_driver": False, "logging_level": "error"}
    if config.placement.ray_address:
        ray.init(address=config.placement.ray_address, **common)
        return
    cores = os.cpu_count() or 1
    wanted = placement.needed(config, placement.resolve_device(config, {"CPU": cores})).total()
    # A laptop may have fewer cores than parts: Ray's CPU is a place in its queue, the kernel shares the real ones.
    ray.init(
        address="local",
        num_cpus=max(cores, math.ceil(wanted["CPU"])),
        resources={"sandbox": wanted["sandbox"]} if wanted["sandbox"] else None,
        include_dashboard=False,
        **common,
    )


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


@contextlib.asynccontextmanager
async def start_parts(config: RunConfig, folder: RunFolder) -> AsyncIterator[Parts]:
    """Starts everything at once (engines take the longest) and stops everything at the end."""
    start_ray(config)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(ray.shutdown)
        available = ray.cluster_resources()
        on_gpu = placement.plan(config, available).device == "cuda"
        name = f"{config.name}/replay"
        buffer = await asyncio.to_thread(replay.start, name, folder.ledger, ReplaySettings.of(config))
        stack.callback(replay.stop, name)
        hosts = await stack.enter_async_context(sandbox_hosts(config))
        learner = asyncio.create_task(LearnerGroup.start(config, str(folder.model), on_gpu=on_gpu))
        stack.push_async_callback(_stop, learner)
        workers = asyncio.create_task(WorkerPool.start(config, str(folder.model), buffer, on_gpu=on_gpu))
        stack.push_async_callback(_stop, workers)
        await asyncio.gather(learner, workers)
        yield Parts(config, folder, on_gpu, buffer, learner.result(), workers.result(), hosts)


async def _stop(starting: asyncio.Task[Any]) -> None:
    """Stops what a start gave, or the start itself when the other part's failed first."""
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().stop()
