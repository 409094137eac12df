"""A rollout worker: one engine, one interpreter pool, many episodes as coroutines, fed by tickets from the replay buffer.

Invariants:
- A worker pulls: it asks for a ticket when it has room for it, so workers join, leave and die in mid-run.
- A worker that is told to leave takes no more tickets, and holds none when its `run` ends.
- Nothing blocking runs on the event loop; `stats()` tells how late the loop is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import ray

from actors.engine import Engine
from actors.engine_places import EnginePlace
from actors.engine_setup import resolve_device, served_adapter
from actors.guided_seats import GuidedSeats
from actors.held_out import HeldOut, episode_runner
from actors.monte_carlo import MonteCarlo
from actors.node_groups import PlacementGroup
from actors.node_groups import place as bundle
from actors.parking import Slots
from actors.processor_time import processor_times
from actors.running_episodes import RunningEpisodes
from actors.weights import Publication, WeightReceiver
from actors.weights.driven_update import DrivenUpdate
from actors.worker_setup import Setup
from toolrl.config import RunConfig
from toolrl.placement import gpu_fraction, gpus_of_a_node, takes_turns
from toolrl.tasks import AnswerChecker
from toolrl.weight_transport import transport_of

log = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 6
LOOP_PROBE_S = 0.1
TICKET_WAIT_S = 1.0


class RolloutWorker:
    """The actor's body; `rollout_worker_actor` wraps it. Create, `start()`, then `run()` once."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        model_dir: str,
        buffer: Any,
        references: Any = None,
        places: PlacementGroup | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.model_dir = model_dir
        self.buffer = buffer
        self.references = references
        self.places = places  # of an engine over several nodes
        self.leaving = asyncio.Event()
        self.loop_lag_s = 0.0
        self._handed_back = asyncio.Event()
        self._stack = contextlib.AsyncExitStack()
        self._beside: list[asyncio.Task[None]] = []  # what goes on beside the episodes

    async def start(self) -> dict[str, Any]:
        """Starts the engine, the interpreter pool and the verifier; returns what a person wants to know about them."""
        started = time.monotonic()
        config = self.config
        # First what a wrong setting or file can break; then the engine, which takes most of the time.
        setup = await asyncio.to_thread(Setup.of, config, self.model_dir)
        self.sandbox, self.tasks = setup.sandbox, setup.tasks
        transport = transport_of(config, resolve_device("auto"))
        self.engine = await Engine.start(
            self.model_dir,
            config.engine,
            dtype=config.model.dtype,
            max_context_tokens=config.rollout.max_context_tokens,
            seed=config.seed,
            name=self.name,
            sleepable=takes_turns(config),
            adapter=served_adapter(config.model.lora),
            places=self.places,
            transport=transport,
        )
        self._stack.push_async_callback(self.engine.stop)
        self.receiver = WeightReceiver(self.engine)
        self.driven = DrivenUpdate(self.receiver, prepares=transport == "gloo", deadline_s=config.weights.deadline_s)
        await self._stack.enter_async_context(self.sandbox)
        self._stack.push_async_callback(setup.toolbox.close)
        checker = await self._stack.enter_async_context(AnswerChecker(config.tasks))
        for verifier in self.tasks.verifiers:  # a wrong import path is found now, not at the first answer
            await checker.load(verifier)
        self.episodes = episode_runner(self.engine, setup, checker, config)
        self.held_out = HeldOut(self.engine, setup, self.episodes, checker, config, self.model_dir)
        self.slots = Slots(config.rollout.concurrency, config.rollout.park_after_s)
        self.running = RunningEpisodes(
            self.name,
            GuidedSeats(self.episodes, config.supervision, config.loop.group_size, self.references),
            self.tasks,
            self.buffer,
            self.slots,
            version=lambda: self.receiver.version,
            max_staleness=config.buffer.max_staleness,
        )
        self.monte_carlo = MonteCarlo.of(config, self.episodes, self.tasks, self.buffer, checker)
        self._stack.callback(self._end_work)  # before the engine goes
        self._stack.callback(asyncio.create_task(self._measure_loop_lag()).cancel)
        return {
            "worker": self.name,
            "start_s": time.monotonic() - started,
            "sandbox": self.sandbox.stats().backend,
            "pid": os.getpid(),
        }

    # The flow of tickets -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Pulls tickets and runs their episodes until `leave()` or `stop()`."""
        self._beside.append(asyncio.create_task(self._heartbeat()))
        if self.engine.nodes is not None:
            self._beside.append(asyncio.create_task(self.engine.nodes.watch()))
        if self.monte_carlo is not None:
            self._beside.append(asyncio.create_task(self.monte_carlo.run(self.leaving)))
        try:
            while not self.leaving.is_set():
                for task in self._beside:
                    if task.done():
                        task.result()  # raises: without a heartbeat every ticket of this worker would be taken back
                if not await self.slots.room(self.config.loop.group_size, timeout_s=TICKET_WAIT_S):
                    continue
                ticket = await self.buffer.wait_for_ticket.remote(
                    self.name, engine_version=self.receiver.version, timeout_s=TICKET_WAIT_S
                )
                if ticket is not None and self.leaving.is_set():
                    await self.buffer.return_ticket.remote(self.name, ticket.group_id)
                elif ticket is not None:
                    self.running.begin(ticket)
            await self._handed_back.wait()  # heartbeats go on until then
        finally:
            self._end_work()

    async def leave(self, grace_s: float) -> int:
        """Takes no more tickets and hands every episode back at its last turn boundary; `run` then ends.

        Args:
            grace_s: turns that are under way have so long to come to their end, or are dropped.

        Returns:
            How many episodes go on elsewhere.
        """
        self.leaving.set()
        handed_back = await self.running.hand_back(grace_s)
        self._handed_back.set()
        return handed_back

    def _end_work(self) -> None:
        """Episodes and continuations end where they are."""
        for task in self._beside:
            task.cancel()
        self.running.cancel(self.running.group_ids)

    async def _heartbeat(self) -> None:
        while True:
            # Groups that went to somebody else meanwhile are not worth another token.
            self.running.cancel(await self.buffer.heartbeat.remote(self.name, self.running.group_ids))
            await asyncio.sleep(self.config.rollout.lease_s / HEARTBEATS_PER_LEASE)

    async def _measure_loop_lag(self) -> None:
        while True:
            asked = time.monotonic()
            await asyncio.sleep(LOOP_PROBE_S)
            late = time.monotonic() - asked - LOOP_PROBE_S
            self.loop_lag_s = max(late, 0.9 * self.loop_lag_s)

    # What the driver asks of a worker ------------------------------------------------------------------------------

    async def update_weights(self, publication: Publication) -> dict[str, Any]:
        """Applies published weights in the middle of whatever runs; returns version, checksums and timings."""
        return await self.receiver.apply(publication)

    async def weight_step(self, name: str, argument: Any = None) -> dict[str, float] | None:
        """One step of an update that the learner drives; see `DrivenUpdate`."""
        return await self.driven.step(name, argument)

    async def sleep(self) -> None:
        """The engine gives its memory up; episodes wait."""
        await self.engine.sleep(self.config.engine.sleep_level)

    async def wake_weights(self) -> None:
        """Makes room for weights."""
        await self.engine.wake_weights()

    async def wake_cache(self) -> None:
        """Episodes go on."""
        await self.engine.wake_cache()

    async def evaluate(
        self, indices: list[int], samples: int, temperature: float, settings: RunConfig | None = None
    ) -> list[bytes]:
        """Plays held-out tasks; see `HeldOut.play`."""
        return await self.held_out.play(indices, samples, temperature, settings)

    async def stats(self) -> dict[str, Any]:
        """Counters and gauges of this worker."""
        return {
            "worker": self.name,
            "version": self.receiver.version,
            "running": self.slots.held,
            "parked": self.slots.parked,
            "waiting": self.slots.waiting,
            "asleep": self.engine.is_asleep,
            **vars(self.running.counts),
            **({} if self.monte_carlo is None else vars(self.monte_carlo.counts)),
            "loop_lag_s": self.loop_lag_s,
            **await asyncio.to_thread(processor_times),
            "sandbox": vars(self.sandbox.stats()),
        }

    async def checksums(self) -> list[dict[str, str]]:
        """Checksums of the weights that the engine holds now, as vLLM computes them."""
        return await self.engine.checksums()

    async def ping(self) -> str:
        return self.name

    async def stop(self) -> None:
        """Ends every episode and closes engine, interpreters and verifier; leaves no process behind."""
        self.leaving.set()
        self._handed_back.set()
        await self._stack.aclose()


def start_rollout_worker(
    name: str,
    config: RunConfig,
    model_dir: str,
    buffer: Any,
    references: Any,
    *,
    on_gpu: bool,
    resources: Mapping[str, float],
    place: EnginePlace | None = None,
) -> Any:
    """Creates the Ray actor; the caller awaits its `start`. `resources`: of the nodes that it belongs on. `place`: see
    `actors.engine_places`."""
    threads = str(config.engine.cpu_threads)
    actor = ray.remote(RolloutWorker).options(
        name=f"{config.name}/{name}",
        num_cpus=config.engine.cpu_threads if not on_gpu else 1,
        num_gpus=gpus_of_a_node(config.engine) * gpu_fraction(config) if on_gpu else 0,
        resources=dict(resources) if place is None or place.whole else {},
        scheduling_strategy="DEFAULT" if place is None else bundle(place.group, place.index),
        max_concurrency=1024,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}},
    )
    places = place.group if place is not None and place.whole else None
    return actor.remote(name, config, model_dir, buffer, references, places)
