"""The rollout workers of a run, seen from the driver: start, feed with weights, watch, replace, stop.

Invariants:
- A worker takes no ticket before it has the latest published weights.
- A publication ends within its deadline, whatever a worker does (see `actors.weights.channel`).
- A worker that died is replaced, at most `MAX_RESTARTS` times each; its tickets come back through their leases.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from actors.rollout_worker import start_rollout_worker
from actors.weights import Delivery, Publication, WeightChannel, WeightsBehind
from toolrl.config import RunConfig
from toolrl.errors import RunError, UserError
from toolrl.trajectory import Trajectory
from toolrl.trajectory_codec import decode

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
STOP_DEADLINE_S = 20.0


class WorkersLost(RunError):
    """No rollout worker is left, or one could not be started."""


@dataclass
class _Member:
    actor: Any
    running: Any = None  # the ref of its `run()`
    restarts: int = 0
    info: dict[str, Any] = field(default_factory=dict)


class WorkerPool:
    """`await WorkerPool.start(…)`, then `publish`, `begin`, and `watch` beside the training."""

    def __init__(self, config: RunConfig, model_dir: str, buffer: Any, *, on_gpu: bool) -> None:
        self.config = config
        self.model_dir = model_dir
        self.buffer = buffer
        self.on_gpu = on_gpu
        self.members: dict[str, _Member] = {}
        self.channel = WeightChannel(config.weights.deadline_s)
        self.begun = False

    @classmethod
    async def start(cls, config: RunConfig, model_dir: str, buffer: Any, *, on_gpu: bool = False) -> WorkerPool:
        """Starts `rollout.workers` workers at once.

        Raises:
            WorkersLost: one did not come up within `engine.start_deadline_s`; says which and why.
            UserError: a setting, a file or a template that cannot work; says what to change.
        """
        pool = cls(config, model_dir, buffer, on_gpu=on_gpu)
        names = [f"rollout-{index}" for index in range(config.rollout.workers)]
        try:
            await asyncio.gather(*(pool._add(name) for name in names))
        except BaseException:
            await pool.stop()
            raise
        return pool

    async def _add(self, name: str, restarts: int = 0) -> None:
        actor = start_rollout_worker(name, self.config, self.model_dir, self.buffer, on_gpu=self.on_gpu)
        member = self.members[name] = _Member(actor, restarts=restarts)
        deadline = self.config.engine.start_deadline_s
        try:
            member.info = await asyncio.wait_for(_value(actor.start.remote()), deadline)
        except TimeoutError:
            raise WorkersLost(
                f"rollout worker {name} was not ready after engine.start_deadline_s={deadline:.0f} s; "
                "raise it, or see the worker's log in Ray's session folder"
            ) from None
        except RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, UserError):  # nothing that another try would mend
                raise cause from None
            why = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
            raise WorkersLost(f"rollout worker {name} did not start: {why}") from error
        try:
            await self.channel.join(name, lambda publication: _value(actor.update_weights.remote(publication)))
        except WeightsBehind as error:
            raise WorkersLost(f"rollout worker {name} did not take the latest weights: {error}") from error
        if self.begun:
            member.running = actor.run.remote()

    async def publish(self, publication: Publication) -> Delivery:
        """Gives every worker the new weights; the delivery names those that are behind."""
        return await self.channel.publish(publication)

    def begin(self) -> None:
        """Lets the workers pull tickets."""
        self.begun = True
        for member in self.members.values():
            member.running = member.actor.run.remote()

    async def watch(self) -> None:
        """Runs until cancelled; replaces workers that died.

        Raises:
            WorkersLost: a worker died more than `MAX_RESTARTS` times.
        """
        while True:
            waiting = {asyncio.ensure_future(_value(m.running)): name for name, m in self.members.items() if m.running}
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                name, error = waiting[future], future.exception()
                if error is None:  # told to stop
                    self.members[name].running = None
                    continue
                await self._replace(name, error)
            if not any(member.running for member in self.members.values()):
                return

    async def _replace(self, name: str, error: BaseException) -> None:
        member = self.members[name]
        if member.restarts >= MAX_RESTARTS:
            raise WorkersLost(
                f"rollout worker {name} died {member.restarts + 1} times; the last time: {error}"
            ) from error
        log.warning("rollout worker %s died (%s): replaced", name, type(error).__name__)
        self.channel.leave(name)
        await self.buffer.release_worker.remote(name)
        ray.kill(member.actor, no_restart=True)
        try:
            await self._add(name, restarts=member.restarts + 1)
        except WorkersLost as again:  # a start that fails is one of the tries
            await self._replace(name, again)

    async def evaluate(self, tasks: int, samples: int, temperature: float) -> list[Trajectory]:
        """Plays the first `tasks` held-out tasks, `samples` times each, spread over the workers.

        Raises:
            WorkersLost: no worker could play one of the shares.
        """
        names = list(self.members)
        shares = [list(range(index, tasks, len(names))) for index in range(len(names))]
        batches = await asyncio.gather(
            *(
                self._play([*names[index:], *names[:index]], share, samples, temperature)
                for index, share in enumerate(shares)
                if share
            )
        )
        return [decode(each) for batch in batches for each in batch]

    async def _play(self, names: list[str], share: list[int], samples: int, temperature: float) -> list[bytes]:
        """One share on the first of the workers that can."""
        why = ""
        for name in names:
            try:
                played: list[bytes] = await self.members[name].actor.evaluate.remote(share, samples, temperature)
                return played
            except RayError as error:  # it died, or its engine did: its peers play its share
                why = f"{name}: {getattr(error, 'cause', None) or error}"
                log.warning("held-out tasks are given to another rollout worker; %s", why)
        raise WorkersLost(f"no rollout worker could play the held-out tasks; the last to try was {why}")

    async def stats(self, deadline_s: float = 5.0) -> list[dict[str, Any]]:
        """What each worker that answers in time says about itself."""
        asked = [_value(member.actor.stats.remote()) for member in self.members.values()]
        answers = await asyncio.gather(*(asyncio.wait_for(a, deadline_s) for a in asked), return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, dict)]

    async def checksums(self) -> dict[str, Any]:
        """{worker: vLLM's checksums of what its engine holds}."""
        return {name: await _value(member.actor.checksums.remote()) for name, member in self.members.items()}

    async def stop(self) -> None:
        """Stops every worker: asked first, killed after a deadline."""
        self.channel.close()
        asked = [_value(member.actor.stop.remote()) for member in self.members.values()]
        await asyncio.gather(*(asyncio.wait_for(a, STOP_DEADLINE_S) for a in asked), return_exceptions=True)
        for member in self.members.values():
            ray.kill(member.actor, no_restart=True)
        self.members.clear()


async def _value(ref: Any) -> Any:
    return await ref
