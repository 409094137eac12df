"""What an episode's tools give for a policy turn: results, receipts, and what comes late.

Invariants:
- A late result is shown at the first turn boundary after it came, once, with its call's id; before it stand the results of
  the boundary's own calls.
- An episode that waits long holds no place meanwhile (`actors.parking`).
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from actors.parking import Slot
from toolrl.config import RolloutConfig
from toolrl.tools import ToolboxSession
from toolrl.tools.wording import late
from toolrl.trajectory import ToolCall, ToolResult, Trajectory, Turn

T = TypeVar("T")


class EpisodeTools:
    """`answer` each policy turn; in the end `note` what never came."""

    def __init__(self, session: ToolboxSession, config: RolloutConfig, slot: Slot | None = None) -> None:
        self.session = session
        self._config = config
        self._slot = slot

    @property
    def outstanding(self) -> list[ToolCall]:
        """Calls whose results the model has not seen."""
        return self.session.under_way.outstanding

    @property
    def changed(self) -> bool:
        """A session that was freed while the episode was parked could not be brought to where it was."""
        return bool(self.session.sessions.changes) and self._config.on_changed_replay != "accept"

    async def answer(self, turn: Turn) -> list[ToolResult]:
        """What the model is shown after this turn: its calls' results or receipts, in their order (they share one
        interpreter), errors of those that cannot be read, then late results as they came. A turn that calls nothing waits
        for all that is outstanding.

        Raises:
            InfraError: a tool's machinery died.
        """
        shown = await self._parked_when_long(self._own(turn))
        shown += [
            ToolResult(call_id=f"error_{index}", name="", status="invalid_call", text=f"Error: {error.message}")
            for index, error in enumerate(turn.call_errors)
        ]
        if not shown and self.outstanding:
            await self._parked_when_long(self.session.under_way.all_arrived(self._config.pending_deadline_s))
        return shown + [self.as_late(result) for result in self.session.under_way.arrived()]

    def as_late(self, result: ToolResult) -> ToolResult:
        """With its call's id in the text."""
        result.text = late(result.call_id, result.text, self._config.truncate_observation)
        return result

    def note(self, trajectory: Trajectory) -> None:
        """Writes down what of the calls is in no result."""
        if self.session.under_way.discarded:
            trajectory.metadata["results_after_deadline"] = self.session.under_way.discarded
        if self.outstanding:
            trajectory.metadata["calls_without_result"] = [call.id for call in self.outstanding]
        if self._slot is not None and self._slot.parked_s:
            trajectory.timings["parked_s"] = trajectory.timings.get("parked_s", 0.0) + self._slot.parked_s

    async def _own(self, turn: Turn) -> list[ToolResult]:
        return [await self.session.call(call) for call in turn.calls]

    async def _parked_when_long(self, work: Coroutine[Any, Any, T]) -> T:
        return await work if self._slot is None else await self._slot.wait(work, self.session.sessions)
