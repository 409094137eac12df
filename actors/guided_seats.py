"""The seats of a group that supervision fills: with a reference in a rollout's place, or with a rollout after a hint.

Invariants:
- Which seats those are follows from the seat's index (`toolrl.supervision.seats`); an episode that goes on stays what it was
  begun as.
- A seat is filled, whatever is missing: a task without a reference, or without an answer to hint at, is played as any other.
- A reference takes its sample's place in the account: it is delivered as that sample's trajectory, and nothing else is
  generated for it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from actors.episode import EpisodeRunner, OnTurn
from actors.parking import Slot
from actors.seat import Seat
from toolrl.config_supervision import SupervisionConfig
from toolrl.supervision.guidance import Guide, guided_by
from toolrl.supervision.hints import hinted_task, note_hint
from toolrl.supervision.off_policy import seated
from toolrl.supervision.seats import guide_of_seat
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory


class GuidedSeats:
    """An `EpisodeRunner` for those who fill groups: `run` plays a seat, or fills it otherwise."""

    def __init__(self, runner: EpisodeRunner, config: SupervisionConfig, group_size: int, references: Any) -> None:
        """`references`: a Ray handle of `toolrl.supervision.References`; None where no seat asks for one."""
        self.runner, self.config, self.group_size, self.references = runner, config, group_size, references

    async def run(
        self,
        task: Task,
        seat: Seat,
        *,
        progress: Trajectory | None = None,
        on_turn: OnTurn | None = None,
        slot: Slot | None = None,
    ) -> Trajectory:
        """See `EpisodeRunner.run`."""
        guide = self._guide(seat) if progress is None else guided_by(progress)
        if guide == "reference" and (placed := await self._reference(task, seat)) is not None:
            return placed
        if guide == "hint" and (hinted := hinted_task(task, self.config.hint.text)) is not None:
            return await self._hinted(task, hinted, seat, progress, on_turn, slot)
        return await self.runner.run(task, seat, progress=progress, on_turn=on_turn, slot=slot)

    def _guide(self, seat: Seat) -> Guide | None:
        return guide_of_seat(seat.sample_index, self.group_size, self.config)

    async def _reference(self, task: Task, seat: Seat) -> Trajectory | None:
        if self.references is None:
            return None
        found: Trajectory | None = await self.references.for_task.remote(self.runner.prompt_ids(task))
        if found is None:
            return None
        placed = seated(
            found,
            trajectory_id=seat.trajectory_id,
            group_id=seat.group_id,
            task_id=task.id,
            sample_index=seat.sample_index,
            temperature=self.runner.config.temperature,
            metadata={"family": task.family, **task.metadata},
        )
        await self.runner.score(placed, task)
        return placed

    async def _hinted(
        self,
        task: Task,
        hinted: Task,
        seat: Seat,
        progress: Trajectory | None,
        on_turn: OnTurn | None,
        slot: Slot | None,
    ) -> Trajectory:
        chat = self.runner.chat

        async def note(trajectory: Trajectory) -> None:
            # In a thread: a rewritten history is rendered whole.
            await asyncio.to_thread(note_hint, trajectory, task, chat.prompt_ids, chat.split_prompt_ids)

        async def at_boundary(trajectory: Trajectory) -> None:
            await note(trajectory)  # before it is saved: whoever goes on with it must know
            if on_turn is not None:
                await on_turn(trajectory)

        played = await self.runner.run(hinted, seat, progress=progress, on_turn=at_boundary, slot=slot)
        await note(played)
        return played
