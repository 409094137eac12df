"""The rollout workers of a run, seen from the driver: start, feed with weights, watch, replace, add and remove,
stop.

Invariants:
- A worker takes no ticket before it has the latest published weights.
- A publication ends within its deadline, whatever a worker does (see `actors.weights.channel`).
- A worker that died is replaced, at most `MAX_RESTARTS` times each; its tickets come back through their leases.
- A worker that is to leave hands its tickets back first; its name is not used again.
- While engines sleep, none starts or leaves: who wants to waits (`changing`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from actors.engine_places import EnginePlaces
from actors.held_out_shares import NotPlayed, play_shares
from actors.node_groups import PLACED_WITHIN_S, PlacementGroup, group_resources
from actors.rollout_worker import start_rollout_worker
from actors.weights import Delivery, Publication, WeightChannel, WeightsBehind
from toolrl.config import RunConfig
from toolrl.errors import RunError, UserError
from toolrl.placement import PlacementError
from toolrl.trajectory import Trajectory
from toolrl.trajectory_codec import decode

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
STOP_DEADLINE_S = 20.0
NAME_FREE_AFTER_S = 5.0
TURN_DEADLINE_S = 120.0  # for falling asleep and for waking up


class WorkersLost(RunError):
    """No rollout worker is left, or one could not be started."""


@dataclass
class _Member:
    actor: Any
    running: asyncio.Task[Any] | None = None  # its `run()`
    restarts: int = 0
    info: dict[str, Any] = field(default_factory=dict)

    def begin(self) -> None:
        self.running = asyncio.create_task(_value(self.actor.run.remote()))
        self.running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


class WorkerPool:
    """`await WorkerPool.start(…)`, then `publish`, `begin`, and `watch` beside the training."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: str,
        buffer: Any,
        references: Any,
        *,
        on_gpu: bool,
        ranks: PlacementGroup | None = None,
    ) -> None:
        self.config = config
        self.model_dir = model_dir
        self.buffer = buffer
        self.references = references
        self.on_gpu = on_gpu
        self._resources = group_resources("rollout")  # as the cluster was: a lost node's group is waited for
        self._places = EnginePlaces(config, on_gpu=on_gpu, resources=self._resources, ranks=ranks)
        self.members: dict[str, _Member] = {}  # at work
        self.channel = WeightChannel(config.weights.deadline_s)
        self.wanted = config.rollout.workers
        self.begun = False
        self._watched = False
        self._others: set[Any] = set()  # actors that are starting or leaving
        self._names = itertools.count()
        self._changed = asyncio.Event()  # the members did
        # Held by whoever changes how many there are, or replaces one, and while engines sleep.
        self.changing = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        config: RunConfig,
        model_dir: str,
        buffer: Any,
        references: Any = None,
        *,
        on_gpu: bool = False,
        ranks: PlacementGroup | None = None,
    ) -> WorkerPool:
        """Starts `rollout.workers` workers at once.

        Args:
            references: a Ray handle of `toolrl.supervision.References`, where supervision wants some.
            ranks: the learner's places, where engines share its GPUs.

        Raises:
            PlacementError: the cluster has no room for an engine over several nodes; says what is missing.
            WorkersLost: one did not come up within `engine.start_deadline_s`; says which and why.
            UserError: a setting, a file or a template that cannot work; says what to change.
        """
        pool = cls(config, model_dir, buffer, references, on_gpu=on_gpu, ranks=ranks)
        try:
            await asyncio.gather(*(pool.add(pool.new_name()) for _ in range(config.rollout.workers)))
        except BaseException:
            await pool.stop()
            raise
        return pool

    def new_name(self) -> str:
        """One that no worker of this pool has had."""
        return f"rollout-{next(self._names)}"

    async def add(self, name: str, restarts: int = 0) -> None:
        """Starts a worker and gives it the latest weights; only then it is a member and, once the run has begun, pulls
        tickets.

        Raises:
            WorkersLost, UserError: see `start`. Nothing is left of it.
        """
        actor = await self._create(name, again=restarts > 0)
        member = _Member(actor, restarts=restarts)
        self._others.add(actor)
        try:
            await self._start(name, member)
        except BaseException:
            self._end(name, actor)
            raise
        finally:
            self._others.discard(actor)
        self.members[name] = member
        if self.begun:
            member.begin()
        self._changed.set()

    async def _create(self, name: str, *, again: bool) -> Any:
        patience_s = self.config.engine.start_deadline_s if again else PLACED_WITHIN_S  # for a node that comes back
        try:
            place = await self._places.take(name, within_s=patience_s)
        except PlacementError as error:
            if again:
                raise WorkersLost(str(error)) from error
            raise
        until = time.monotonic() + NAME_FREE_AFTER_S
        while True:
            try:
                return start_rollout_worker(
                    name,
                    self.config,
                    self.model_dir,
                    self.buffer,
                    self.references,
                    on_gpu=self.on_gpu,
                    resources=self._resources,
                    place=place,
                )
            except ValueError:  # Ray frees the name of a dead actor a moment after its end
                if time.monotonic() > until:
                    self._places.give_back(name)
                    raise
                await asyncio.sleep(0.1)

    async def _start(self, name: str, member: _Member) -> None:
        actor, deadline = member.actor, self.config.engine.start_deadline_s
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

    async def publish(self, publication: Publication) -> Delivery:
        """Gives every worker the new weights; the delivery names those that are behind."""
        return await self.channel.publish(publication)

    def handles(self) -> dict[str, Any]:
        """The workers at work, by name, as the learner calls them."""
        return {name: member.actor for name, member in self.members.items()}

    async def sleep(self) -> None:
        """Every engine gives up its memory; waits for those that are starting or leaving."""
        await self.changing.acquire()
        await self._on_each("sleep")

    async def wake_weights(self) -> None:
        """Every engine takes back the memory of its weights: now publish."""
        await self._on_each("wake_weights")

    async def wake_cache(self) -> None:
        """Every engine goes on."""
        await self._on_each("wake_cache")
        self.changing.release()

    async def _on_each(self, call: str) -> None:
        """A worker that does not do it in time is ended, which frees its memory; `watch` replaces it when engines may start."""
        members = dict(self.members)
        asked = [
            asyncio.wait_for(_value(getattr(each.actor, call).remote()), TURN_DEADLINE_S) for each in members.values()
        ]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        for (name, member), outcome in zip(members.items(), outcomes, strict=True):
            if isinstance(outcome, Exception):
                why = str(outcome) or type(outcome).__name__
                log.warning("rollout worker %s is ended: %s failed: %s", name, call, why)
                ray.kill(member.actor, no_restart=True)

    def begin(self) -> None:
        """Lets the workers pull tickets."""
        self.begun = True
        for member in self.members.values():
            member.begin()

    async def watch(self) -> None:
        """Runs until cancelled; replaces workers that died.

        Raises:
            WorkersLost: a worker died more than `MAX_RESTARTS` times.
        """
        self._watched = True
        try:
            await self._watch()
        finally:
            self._watched = False

    async def _watch(self) -> None:
        while True:
            self._changed.clear()
            running = {member.running: name for name, member in self.members.items() if member.running is not None}
            change = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait([*running, change], return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
            for ended, name in running.items():
                if not ended.done() or name not in self.members:  # those that leave are no members any more
                    continue
                error = ended.exception()
                if error is None:  # told to stop
                    self.members[name].running = None
                else:
                    await self._replace(name, error)
            if not any(member.running for member in self.members.values()):
                return

    async def _replace(self, name: str, error: BaseException) -> None:
        member = self.members.pop(name)
        log.warning("rollout worker %s died (%s)", name, type(error).__name__)
        self.channel.leave(name)
        self._end(name, member.actor)
        await self.buffer.release_worker.remote(name)  # its peers go on with its episodes at once
        async with self.changing:
            for tries in range(member.restarts + 1, MAX_RESTARTS + 1):
                if len(self.members) >= self.wanted:  # fewer are wanted by now
                    return None
                try:
                    return await self.add(name, restarts=tries)
                except WorkersLost as again:  # a start that fails is one of the tries
                    error = again
        raise WorkersLost(f"rollout worker {name} died {MAX_RESTARTS + 1} times; the last time: {error}") from error

    async def remove(self, name: str) -> int:
        """Lets a worker hand its episodes back and takes it out.

        Returns:
            How many episodes it handed back; 0 when it died over it, and its leases were released.
        """
        member = self.members.pop(name)
        self._others.add(member.actor)
        self._changed.set()
        self.channel.leave(name)
        grace = self.config.rollout.hand_over_grace_s
        handed_back = 0
        try:
            async with asyncio.timeout(grace + STOP_DEADLINE_S):
                handed_back = await _value(member.actor.leave.remote(grace))
                if member.running is not None:
                    await member.running
                await _value(member.actor.stop.remote())
        except (RayError, TimeoutError) as error:
            log.warning("rollout worker %s did not leave in order: %s", name, error or type(error).__name__)
        finally:
            self._end(name, member.actor)
            self._others.discard(member.actor)
        await self.buffer.release_worker.remote(name)  # what it may still hold; nothing, when it left in order
        return handed_back

    async def evaluate(
        self, tasks: int, samples: int, temperature: float, settings: RunConfig | None = None
    ) -> list[Trajectory]:
        """Plays the first `tasks` held-out tasks, `samples` times each, spread over the workers.

        Args:
            settings: what to play under and whose tasks, in the place of the run's; the engines stay as they are.

        Raises:
            WorkersLost: no worker could play one of the shares, nor one that `watch` put into its place.
        """
        patience_s = self.config.engine.start_deadline_s if self._watched else 0.0
        try:
            played = await play_shares(
                self.members,
                tasks,
                samples,
                temperature,
                settings,
                deadline_s=self.config.loop.eval_deadline_s,
                patience_s=patience_s,
            )
        except NotPlayed as error:
            raise WorkersLost(str(error)) from error
        return [decode(each) for each in played]

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
        actors = [member.actor for member in self.members.values()]
        asked = [_value(actor.stop.remote()) for actor in actors]
        await asyncio.gather(*(asyncio.wait_for(a, STOP_DEADLINE_S) for a in asked), return_exceptions=True)
        for name, member in self.members.items():
            self._end(name, member.actor)
        for actor in self._others:
            ray.kill(actor, no_restart=True)
        self.members.clear()

    def _end(self, name: str, actor: Any) -> None:
        ray.kill(actor, no_restart=True)
        self._places.give_back(name)


async def _value(ref: Any) -> Any:
    return await ref
