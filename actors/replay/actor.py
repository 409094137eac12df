"""`ReplayBuffer`: the replay store as a named Ray actor, with waiting instead of polling.

- The store is used by one thread of its own, so a disk that is slow for a moment never holds up the actor's event loop.
- The actor is restarted without limit and goes on from its file; calls that were under way are repeated, and every call
  may be repeated without harm: a second `put` or reward is a duplicate, a second `ack` is False, `wait_for_batch` with the same
  `request` gives the same batch, and a ticket whose answer got lost comes back because no heartbeat names it.
- It lives on the node that starts it, where its file is, and outlives the handles that point to it: end it with `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.replay.policies import sampling_policies
from actors.replay.records import Batch, Entry, PutStatus, ReplaySettings, Ticket
from actors.replay.rewards import AwaitedReward, RewardAnswer
from actors.replay.store import ReplayStore
from toolrl.ledger import Ledger
from toolrl.trajectory import Trajectory

T = TypeVar("T")

# Leases expire by the clock and not by an event, so those who wait look again this often.
_LOOK_AGAIN_S = 1.0


class ReplayBuffer:
    """The actor's class. `start` makes one; every method is called as `handle.method.remote(…)`. See `ReplayStore`."""

    def __init__(self, path: str, settings: ReplaySettings) -> None:
        self._store = ReplayStore(path, settings)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replay-store")
        self._changed = asyncio.Condition()
        self._publications = 0  # how often the published version has changed

    async def _read(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*args, **options))

    async def _write(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        result = await self._read(call, *args, **options)
        async with self._changed:
            self._changed.notify_all()
        return result

    async def _wait(
        self, attempt: Callable[[], T | None], deadline: float, give_up: Callable[[], bool] = lambda: False
    ) -> T | None:
        """Tries now and after every change, until it gives something, `give_up`, or the deadline (monotonic) has
        passed."""
        while True:
            async with self._changed:  # held while trying, so that no change falls between the try and the wait
                found = await self._read(attempt)
                left = deadline - time.monotonic()
                if found is not None or left <= 0 or give_up():
                    return found
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(left, _LOOK_AGAIN_S))

    # The worker's side.

    async def wait_for_ticket(
        self, worker: str, *, engine_version: int | None = None, timeout_s: float = 10.0
    ) -> Ticket | None:
        """A ticket as soon as there is one for this worker, or None: ask again.

        None comes after the timeout, and at once when other weights are published meanwhile, because the
        `engine_version` that the worker told is out of date by then.
        """
        publications = self._publications
        return await self._wait(
            lambda: self._store.lease_ticket(worker, engine_version=engine_version),
            time.monotonic() + timeout_s,
            give_up=lambda: engine_version is not None and self._publications != publications,
        )

    async def lease_ticket(self, worker: str, *, engine_version: int | None = None) -> Ticket | None:
        return await self._write(self._store.lease_ticket, worker, engine_version=engine_version)

    async def issue(self, n_groups: int) -> list[str]:
        return await self._write(self._store.issue, n_groups)

    async def heartbeat(self, worker: str, group_ids: Sequence[str] | None = None) -> list[str]:
        return await self._read(self._store.heartbeat, worker, group_ids)

    async def return_ticket(self, worker: str, group_id: str) -> bool:
        return await self._write(self._store.return_ticket, worker, group_id)

    async def release_worker(self, worker: str) -> list[str]:
        return await self._write(self._store.release_worker, worker)

    async def put(self, worker: str, finished: Sequence[Trajectory | Entry]) -> list[PutStatus]:
        return await self._write(self._store.put, worker, finished)

    async def put_progress(self, worker: str, unfinished: Sequence[Trajectory | Entry]) -> int:
        return await self._read(self._store.put_progress, worker, unfinished)

    # The reward workers' side.

    async def wait_for_unrewarded(
        self, name: str, *, limit: int = 16, claim_s: float = 60.0, timeout_s: float = 10.0
    ) -> list[AwaitedReward]:
        """Trajectories that wait for the reward `name`, as soon as there are some; none after the timeout: ask again."""
        found = await self._wait(
            lambda: self._store.claim_unrewarded(name, limit=limit, claim_s=claim_s) or None,
            time.monotonic() + timeout_s,
        )
        return found or []

    async def deliver_reward(self, trajectory_id: str, name: str, value: Any) -> RewardAnswer:
        """See `ReplayStore.deliver_reward`."""
        return await self._write(self._store.deliver_reward, trajectory_id, name, value)

    # The learner's side.

    async def wait_for_batch(
        self,
        learner: str,
        n_groups: int,
        learner_version: int,
        *,
        timeout_s: float,
        patience_s: float | None = None,
        request: str | None = None,
    ) -> Batch | None:
        """A batch as soon as there is one, or None after the timeout (`waiting_for` then says for whom it waited).

        None comes at once where no batch will ever come because the tasks have no spread (`no_spread` then says so).

        Args:
            patience_s: after so long, what is ready must do: old groups are waited for no more, and groups go on
                without their missing samples. None: only when the timeout has passed, as the last try.
            request: see `ReplayStore.lease_batch`.
        """
        start = time.monotonic()
        patient_until = start + min(timeout_s, timeout_s if patience_s is None else patience_s)

        hopeless = False

        def attempt(patient: bool) -> Batch | None:
            nonlocal hopeless
            batch = self._store.lease_batch(learner, n_groups, learner_version, patient=patient, request=request)
            hopeless = batch is None and self._store.no_spread() is not None
            return batch

        batch = await self._wait(lambda: attempt(True), patient_until, lambda: hopeless)
        if batch is None and not hopeless:
            batch = await self._wait(lambda: attempt(False), start + timeout_s, lambda: hopeless)
        return batch

    async def lease_batch(
        self, learner: str, n_groups: int, learner_version: int, *, patient: bool = True, request: str | None = None
    ) -> Batch | None:
        return await self._write(
            self._store.lease_batch, learner, n_groups, learner_version, patient=patient, request=request
        )

    async def heartbeat_batch(self, batch_id: int) -> bool:
        return await self._read(self._store.heartbeat_batch, batch_id)

    async def ack(self, batch_id: int, step: int, version: int) -> bool:
        return await self._write(self._store.ack, batch_id, step, version)

    async def reject(self, batch_id: int, reason: str) -> bool:
        return await self._write(self._store.reject, batch_id, reason)

    async def nack(self, batch_id: int) -> bool:
        return await self._write(self._store.nack, batch_id)

    async def set_version(self, version: int) -> None:
        self._publications += 1
        await self._write(self._store.set_version, version)

    async def admit(self, is_open: bool) -> None:
        await self._write(self._store.admit, is_open)

    async def rollback_to(self, step: int, version: int) -> dict[str, int]:
        self._publications += 1
        return await self._write(self._store.rollback_to, step, version)

    async def expire(self) -> tuple[list[str], list[int]]:
        return await self._write(self._store.expire)

    # Reports.

    async def ledger(self) -> Ledger:
        return await self._read(self._store.ledger)

    async def audit(self) -> list[str]:
        return await self._read(self._store.audit)

    async def stats(self) -> dict[str, float]:
        return await self._read(self._store.stats)

    async def waiting_for(self) -> str:
        return await self._read(self._store.waiting_for)

    async def no_spread(self) -> str | None:
        return await self._read(self._store.no_spread)

    async def trained_task_indices(self) -> list[int]:
        return await self._read(self._store.trained_task_indices)

    async def ping(self) -> None:
        """Answers when the event loop is free, whatever the store does."""


def start(name: str, path: str | Path, settings: ReplaySettings, *, deadline_s: float = 60.0) -> Any:
    """Starts the buffer as actor `name` on this node and waits until its file is open. Returns the handle.

    One that is left over under this name, from a driver that died, is ended first; the work in the file goes on.

    Raises:
        TimeoutError: it did not come up by the deadline.
        UnknownName: a sampling policy that does not exist.
        ray.exceptions.ActorDiedError: the file cannot be opened; it names the cause.
    """
    sampling_policies.get(settings.sampling)
    until = time.monotonic() + deadline_s
    stop(name)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(ReplayBuffer).options(
        name=name,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=1000,
        scheduling_strategy=here,
    )
    while True:
        try:
            handle = actor.remote(str(Path(path).absolute()), settings)
            break
        except ValueError as error:  # Ray frees the name of a dead actor a moment after its end
            if time.monotonic() > until:
                raise TimeoutError(f"the name {name!r} was not free within {deadline_s:.0f} s") from error
            time.sleep(0.1)
    try:
        ray.get(handle.ping.remote(), timeout=max(1.0, until - time.monotonic()))
    except ray.exceptions.GetTimeoutError as error:
        ray.kill(handle)
        raise TimeoutError(f"the replay buffer {name!r} at {path} did not start within {deadline_s:.0f} s") from error
    return handle


def stop(name: str) -> bool:
    """Ends the buffer of this name, if there is one. Its file is whole at any moment, so no farewell is needed."""
    try:
        handle = ray.get_actor(name)
    except ValueError:
        return False
    ray.kill(handle)
    return True
