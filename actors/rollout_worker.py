"""A rollout worker: one engine, one interpreter pool, many episodes as coroutines, fed by tickets from the replay buffer.

Invariants:
- A worker pulls: it asks for a ticket when it has room for it, so workers join, leave and die in mid-run.
- Whatever becomes of an episode is reported to the buffer; an episode that was lost with its engine comes back through the
  ticket's lease.
- Nothing blocking runs on the event loop; `stats()` tells how late the loop is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from functools import partial
from typing import Any

import ray

from actors.engine import Engine, EngineDied
from actors.episode import EpisodeRunner, Seat
from actors.replay import Entry, Ticket
from actors.weights import Publication, WeightReceiver
from actors.worker_setup import Setup
from toolrl.config import RunConfig
from toolrl.placement import gpu_fraction
from toolrl.rewards import RewardPipeline
from toolrl.tasks import AnswerChecker, Task
from toolrl.trajectory import Outcome, Trajectory
from toolrl.trajectory_codec import encode

log = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 6
LOOP_PROBE_S = 0.1
TICKET_WAIT_S = 1.0
ENGINE_DIED = 70  # exit code of a worker without an engine


class RolloutWorker:
    """The actor's body; `rollout_worker_actor` wraps it. Create, `start()`, then `run()` once."""

    def __init__(self, name: str, config: RunConfig, model_dir: str, buffer: Any) -> None:
        self.name = name
        self.config = config
        self.model_dir = model_dir
        self.buffer = buffer
        self.running: dict[str, dict[int, asyncio.Task[None]]] = {}  # group id -> sample index -> episode
        self.stopping = asyncio.Event()
        self.loop_lag_s = 0.0
        self.finished_episodes = 0
        self.sampled_tokens = 0
        self.busy_s = 0.0
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> dict[str, Any]:
        """Starts the engine, the interpreter pool and the verifier; returns what a person wants to know about them."""
        started = time.monotonic()
        config = self.config
        # First what a wrong setting or file can break; then the engine, which takes most of the time.
        setup = await asyncio.to_thread(Setup.of, config, self.model_dir)
        self.sandbox, self.tasks = setup.sandbox, setup.tasks
        self.engine = await Engine.start(
            self.model_dir,
            config.engine,
            dtype=config.model.dtype,
            max_context_tokens=config.rollout.max_context_tokens,
            seed=config.seed,
            name=self.name,
        )
        self._stack.push_async_callback(self.engine.stop)
        self.receiver = WeightReceiver(self.engine)
        await self._stack.enter_async_context(self.sandbox)
        checker = await self._stack.enter_async_context(AnswerChecker(config.tasks))
        for verifier in self.tasks.verifiers:  # a wrong import path is found now, not at the first answer
            await checker.load(verifier)
        self.episodes = EpisodeRunner(
            self.engine,
            setup.chat,
            setup.parser,
            setup.toolbox,
            RewardPipeline(config.rewards, checker),
            config.rollout,
            tokenizer=setup.tokenizer,
            answer=config.tasks.answer,
        )
        self._background = [asyncio.create_task(self._measure_loop_lag())]
        return {
            "worker": self.name,
            "start_s": time.monotonic() - started,
            "sandbox": self.sandbox.stats().backend,
            "pid": os.getpid(),
        }

    # The flow of tickets -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Pulls tickets and runs their episodes until `stop()`."""
        heartbeat = asyncio.create_task(self._heartbeat())
        try:
            while not self.stopping.is_set():
                if heartbeat.done():
                    heartbeat.result()  # raises: without a heartbeat every ticket of this worker would be taken back
                episodes = self._episodes()
                if episodes and len(episodes) + self.config.loop.group_size > self.config.rollout.concurrency:
                    await asyncio.wait(episodes, return_when=asyncio.FIRST_COMPLETED)
                    continue
                ticket = await self.buffer.wait_for_ticket.remote(
                    self.name, engine_version=self.receiver.version, timeout_s=TICKET_WAIT_S
                )
                if ticket is not None:
                    self._begin(ticket)
        finally:
            heartbeat.cancel()
            self._cancel(list(self.running))

    def _episodes(self) -> list[asyncio.Task[None]]:
        return [episode for group in self.running.values() for episode in group.values()]

    def _begin(self, ticket: Ticket) -> None:
        task = self.tasks.task(ticket.task_index)
        group = self.running.setdefault(ticket.group_id, {})
        for sample_index in ticket.samples_missing:
            seat = Seat(ticket.group_id, sample_index, ticket.seeds[sample_index])
            group[sample_index] = asyncio.create_task(self._episode(task, seat))
            group[sample_index].add_done_callback(partial(self._forget, seat))

    def _forget(self, seat: Seat, _: asyncio.Task[None]) -> None:
        group = self.running.get(seat.group_id, {})
        group.pop(seat.sample_index, None)
        if not group:
            self.running.pop(seat.group_id, None)

    def _cancel(self, group_ids: list[str]) -> None:
        for group_id in group_ids:
            for episode in self.running.get(group_id, {}).values():
                episode.cancel()

    async def _episode(self, task: Task, seat: Seat) -> None:
        try:
            trajectory = await self.episodes.run(task, seat, on_turn=self._save_progress)
            entry = self._entry(trajectory)
        except EngineDied:
            log.exception("engine of worker %s died", self.name)
            os._exit(ENGINE_DIED)  # the actor dies whole: its leases are released and its peers take over
        except Exception as error:  # a fault of ours costs its own episode, never the run
            log.exception("episode %s failed", seat.trajectory_id)
            entry = self._entry(_failed(task, seat, error))
        await self.buffer.put.remote(self.name, [entry])

    def _entry(self, trajectory: Trajectory) -> Entry:
        trajectory.metadata["worker"] = self.name
        entry = Entry.of(trajectory)
        self.finished_episodes += 1
        self.sampled_tokens += sum(len(turn.token_ids) for turn in trajectory.policy_turns)
        return entry

    async def _save_progress(self, trajectory: Trajectory) -> None:
        # Not awaited: an episode does not wait for the buffer's disk; a later write of the same episode replaces this one.
        self.buffer.put_progress.remote(self.name, [Entry.of(trajectory)])

    async def _heartbeat(self) -> None:
        while True:
            # Groups that went to somebody else meanwhile are not worth another token.
            self._cancel(await self.buffer.heartbeat.remote(self.name, list(self.running)))
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

    async def evaluate(self, indices: list[int], samples: int, temperature: float) -> list[bytes]:
        """Plays held-out tasks `indices`, `samples` times each; returns encoded trajectories."""
        held_out = await asyncio.to_thread(self.tasks.held_out)
        gate = asyncio.Semaphore(self.config.rollout.concurrency)

        async def one(index: int, sample: int) -> bytes:
            async with gate:
                seat = Seat(f"eval-{index}", sample, seed=index * samples + sample)
                return encode(await self.episodes.run(held_out[index], seat, temperature=temperature))

        return list(await asyncio.gather(*(one(i, s) for i in indices for s in range(samples))))

    async def stats(self) -> dict[str, Any]:
        """Counters and gauges of this worker."""
        return {
            "worker": self.name,
            "version": self.receiver.version,
            "running": len(self._episodes()),
            "finished_episodes": self.finished_episodes,
            "sampled_tokens": self.sampled_tokens,
            "loop_lag_s": self.loop_lag_s,
            "sandbox": vars(self.sandbox.stats()),
        }

    async def checksums(self) -> list[dict[str, str]]:
        """Checksums of the weights that the engine holds now, as vLLM computes them."""
        return await self.engine.checksums()

    async def ping(self) -> str:
        return self.name

    async def stop(self) -> None:
        """Ends every episode and closes engine, interpreters and verifier; leaves no process behind."""
        self.stopping.set()
        self._cancel(list(self.running))
        for task in self._background:
            task.cancel()
        await self._stack.aclose()


def _failed(task: Task, seat: Seat, error: Exception) -> Trajectory:
    return Trajectory(
        id=seat.trajectory_id,
        group_id=seat.group_id,
        task_id=task.id,
        sample_index=seat.sample_index,
        prompt_ids=[],
        outcome=Outcome.INFRA_ERROR,
        metadata={"family": task.family, "infra_error": f"{type(error).__name__}: {error}"[:500]},
    )


def start_rollout_worker(name: str, config: RunConfig, model_dir: str, buffer: Any, *, on_gpu: bool) -> Any:
    """Creates the Ray actor; the caller awaits its `start`."""
    threads = str(config.engine.cpu_threads)
    actor = ray.remote(RolloutWorker).options(
        name=f"{config.name}/{name}",
        num_cpus=config.engine.cpu_threads if not on_gpu else 1,
        num_gpus=config.engine.tensor_parallel * gpu_fraction(config) if on_gpu else 0,
        max_concurrency=1024,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}},
    )
    return actor.remote(name, config, model_dir, buffer)
