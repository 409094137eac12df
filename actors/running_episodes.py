"""The episodes that a rollout worker plays: begun from a ticket, watched at their turn boundaries, delivered or handed
back.

Invariants:
- Whatever becomes of an episode is reported to the buffer; one that was lost with its engine comes back through the
  ticket's lease, with its last saved boundary.
- A worker that leaves hands back every ticket that is not finished, each episode at its last turn boundary. Nothing is
  generated afterwards.
- An episode that no learner may train on any more ends at its next boundary, as `stale`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from actors.continuation import prefix_of
from actors.deliveries import Deliveries
from actors.engine import EngineDied
from actors.episode import EpisodeRunner
from actors.guided_seats import GuidedSeats
from actors.parking import Slots
from actors.replay import Entry, Ticket
from actors.seat import Seat
from toolrl.supervision.guidance import guided_by
from toolrl.tasks import Task, TaskSource
from toolrl.trajectory import Outcome, Trajectory

log = logging.getLogger(__name__)

ENGINE_DIED = 70  # exit code of a worker without an engine


class HandedBack(Exception):
    """The worker leaves: this episode ends here and goes on elsewhere."""


@dataclass
class EpisodeCounts:
    """Since the worker began."""

    finished_episodes: int = 0
    sampled_tokens: int = 0  # of finished episodes, what others sampled of them included; of references nothing
    continued_episodes: int = 0  # finished ones that were taken up at a turn boundary
    changed_replays: int = 0  # of those, where a recorded call gave something else


class RunningEpisodes:
    """`begin` tickets; in the end `hand_back` or `cancel`."""

    def __init__(
        self,
        worker: str,
        runner: EpisodeRunner | GuidedSeats,
        tasks: TaskSource,
        buffer: Any,
        slots: Slots,
        *,
        version: Callable[[], int],
        max_staleness: int,
    ) -> None:
        self.worker = worker
        self.runner = runner
        self.tasks = tasks
        self.buffer = buffer
        self.slots = slots
        self.counts = EpisodeCounts()
        self._version = version
        self._max_staleness = max_staleness
        self._groups: dict[str, dict[int, asyncio.Task[bool]]] = {}  # group id -> sample index -> episode
        self._boundaries: dict[str, Trajectory] = {}  # trajectory id -> the live object, which ends at a turn boundary
        self._deliveries = Deliveries(worker, buffer, still_running=self._is_here)
        self._leaving = False

    @property
    def group_ids(self) -> list[str]:
        return list(self._groups)

    @property
    def episodes(self) -> list[asyncio.Task[bool]]:
        return [episode for group in self._groups.values() for episode in group.values()]

    def begin(self, ticket: Ticket) -> None:
        """Plays the ticket's missing samples, from where another worker left them if one did."""
        task = self.tasks.task(ticket.task_index)
        group = self._groups.setdefault(ticket.group_id, {})
        for sample_index in ticket.samples_missing:
            seat = Seat(ticket.group_id, sample_index, ticket.seeds[sample_index])
            group[sample_index] = asyncio.create_task(self._episode(task, seat, ticket.progress.get(sample_index)))
            group[sample_index].add_done_callback(partial(self._forget, seat))

    def _forget(self, seat: Seat, _: asyncio.Task[bool]) -> None:
        group = self._groups.get(seat.group_id, {})
        group.pop(seat.sample_index, None)
        if not group:
            self._groups.pop(seat.group_id, None)

    def cancel(self, group_ids: Iterable[str]) -> None:
        """Ends the episodes of these groups where they are; nothing is reported."""
        for group_id in group_ids:
            for episode in self._groups.get(group_id, {}).values():
                episode.cancel()

    async def _episode(self, task: Task, seat: Seat, progress: Trajectory | None) -> bool:
        """Plays one; whether it was delivered."""
        try:
            async with self.slots.slot() as slot:
                if self._leaving:
                    raise HandedBack
                trajectory = await self.runner.run(task, seat, progress=progress, on_turn=self._at_boundary, slot=slot)
            entry = self._entry(trajectory)
        except HandedBack:
            return False
        except EngineDied:
            log.exception("engine of worker %s died", self.worker)
            os._exit(ENGINE_DIED)  # the actor dies whole: its leases are released and its peers take over
        except Exception as error:  # a fault of ours costs its own episode, never the run
            log.exception("episode %s failed", seat.trajectory_id)
            entry = self._entry(_failed(task, seat, error))
        finally:
            if not self._leaving:
                self._boundaries.pop(seat.trajectory_id, None)
        await self._deliveries.deliver(entry)
        self._boundaries.pop(seat.trajectory_id, None)
        return True

    def _entry(self, trajectory: Trajectory) -> Entry:
        trajectory.metadata["worker"] = self.worker
        entry = Entry.of(trajectory)
        self.counts.finished_episodes += 1
        if guided_by(trajectory) != "reference":
            self.counts.sampled_tokens += sum(len(turn.token_ids) for turn in trajectory.policy_turns)
        self.counts.continued_episodes += "continued_after" in trajectory.metadata
        self.counts.changed_replays += "replay_changed" in trajectory.metadata
        return entry

    # Turn boundaries -----------------------------------------------------------------------------------------------

    async def _at_boundary(self, trajectory: Trajectory) -> None:
        oldest = trajectory.oldest_version
        if oldest is not None and oldest < self._version() - self._max_staleness:
            trajectory.outcome = Outcome.STALE
            return
        self._boundaries[trajectory.id] = trajectory
        if self._leaving:
            raise HandedBack
        self._deliveries.save(trajectory)

    def _is_here(self, trajectory: Trajectory) -> bool:
        return self._boundaries.get(trajectory.id) is trajectory and not self._leaving

    # Leaving -------------------------------------------------------------------------------------------------------

    async def hand_back(self, grace_s: float) -> int:
        """Gives every unfinished ticket back; a turn that is under way has `grace_s` to come to its end, or is dropped.

        Returns:
            How many episodes go on elsewhere.
        """
        self._leaving = True
        groups = {group_id: dict(episodes) for group_id, episodes in self._groups.items()}  # they shrink meanwhile
        handed = await asyncio.gather(*(self._hand_back_group(*group, grace_s) for group in groups.items()))
        return sum(handed)

    async def _hand_back_group(self, group_id: str, episodes: dict[int, asyncio.Task[bool]], grace_s: float) -> int:
        _, late = await asyncio.wait(episodes.values(), timeout=grace_s)
        for episode in late:
            episode.cancel()
        ends = await asyncio.gather(*episodes.values(), return_exceptions=True)
        left = [self._boundaries.pop(Seat(group_id, sample, 0).trajectory_id, None) for sample in episodes]
        unfinished = [prefix_of(trajectory) for trajectory in left if trajectory is not None]
        if entries := [Entry.of(trajectory) for trajectory in unfinished if trajectory.turns]:
            await self.buffer.put_progress.remote(self.worker, entries)
        await self.buffer.return_ticket.remote(self.worker, group_id)
        return sum(end is not True for end in ends)


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
