"""A run that stands still until somebody has looked, and one that somebody has asked to end.

A guard pauses a run (`toolrl.guards.actions.pause`); `toolrl continue RUN` lets it go on, `toolrl stop RUN` ends it, paused
or not, after the step that it is at, or at once where it waits for a batch. Both are orders to the live run, see
`toolrl.app.live_orders`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from toolrl.errors import RunError, UserError

T = TypeVar("T")
Answer = Literal["continue", "roll_back", "stop"]


class Unattended(RunError):
    """The run was paused and nobody came."""


@dataclass
class Pausing:
    """Lives in the driver's event loop."""

    why: str | None = None  # it is paused
    stop_asked: bool = False
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _answered: asyncio.Event = field(default_factory=asyncio.Event)
    _answer: Answer = "continue"

    async def wait(self, why: str, deadline_s: float) -> Answer:
        """Stands still until `go_on` or `stop`. Raises Unattended when neither came in `deadline_s`."""
        if self.stop_asked:
            return "stop"
        self.why = why
        self._answered.clear()
        try:
            async with asyncio.timeout(deadline_s):
                await self._answered.wait()
        except TimeoutError:
            raise Unattended(
                f"paused for {deadline_s:g} s and neither continued nor stopped; it was paused because {why}"
            ) from None
        finally:
            self.why = None
        return self._answer

    async def unless_stopped(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """What `waiting` gives, or None at once when somebody asks the run to end meanwhile."""
        waits, stops = asyncio.create_task(waiting), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({waits, stops}, return_when=asyncio.FIRST_COMPLETED)
            return waits.result() if waits.done() else None
        finally:
            waits.cancel()
            stops.cancel()

    def go_on(self, *, roll_back: bool = False) -> str:
        """Ends the pause; returns why there was one. Raises UserError where there is none.

        Args:
            roll_back: from the last good checkpoint.
        """
        if self.why is None:
            raise UserError("the run is not paused")
        return self._give("roll_back" if roll_back else "continue")

    def stop(self) -> bool:
        """Ends the run after the step that it is at; returns whether it was paused."""
        self.stop_asked = True
        self._stopping.set()
        paused = self.why is not None
        self._give("stop")
        return paused

    def _give(self, answer: Answer) -> str:
        why, self._answer = self.why or "", answer
        self._answered.set()
        return why
