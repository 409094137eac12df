"""One episode's sessions of its tools: opened at the first call, freed while the episode is parked, closed with it.

Invariants:
- While the episode is parked, a session that holds something scarce (`Tool.frees_when_parked`) and runs nothing is
  closed. At its tool's next call a fresh one is brought to the same state by running the calls again.
- Calls of one session begin in the order in which they were made.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from toolrl.tools.protocol import Tool, ToolSession
from toolrl.trajectory import STOPPED, ToolCall, ToolResult

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class StateChange:
    """A call that gave something else when it was run again."""

    call_id: str
    recorded: str  # status and the beginning of the text
    replayed: str


@dataclass(frozen=True)
class Ran:
    """What is kept of a call: enough to run it again and to see whether it gave the same."""

    call: ToolCall
    status: str
    said: str
    digest: bytes

    @classmethod
    def of(cls, call: ToolCall, result: ToolResult) -> Ran:
        said = f"{result.status}: {result.text[:_SHOWN_CHARACTERS]}"
        return cls(call, result.status, said, hashlib.blake2b(result.text.encode("utf-8", "replace")).digest())

    def same(self, other: Ran) -> bool:
        return self.status == other.status and (self.digest == other.digest or self.status in STOPPED)


@dataclass
class _Place:
    """A tool's place in the episode, with or without a session."""

    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    session: ToolSession | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    running: int = 0
    ran: list[Ran] = field(default_factory=list)


class OpenSessions:
    """`run` calls; `park` and `unpark` as the episode does; `close` in the end."""

    def __init__(self, episode_id: str, *, keep_when_parked: bool = False) -> None:
        self.changes: list[StateChange] = []  # found when sessions were opened again
        self.rebuilt = 0  # times that one was
        self._episode_id = episode_id
        self._keep = keep_when_parked
        self._parked = False
        self._places: dict[str, _Place] = {}

    async def opened(self, tool: Tool) -> ToolSession:
        """Its session, opened and brought to its state where there is none. Count it as running first: see `run`."""
        place = self._places[tool.name]
        async with place.opening:
            if place.session is None:
                session = await place.stack.enter_async_context(tool.session(self._episode_id))
                self.rebuilt += bool(place.ran)
                for before in place.ran:
                    now = Ran.of(before.call, await session.call(before.call))
                    if not before.same(now):
                        self.changes.append(StateChange(before.call.id, before.said, now.said))
                place.session = session
            return place.session

    def begin(self, tool: Tool) -> None:
        """A call to this tool is under way from now on: its session stays."""
        self._places.setdefault(tool.name, _Place()).running += 1

    def end(self, tool: Tool, call: ToolCall, result: ToolResult | None) -> None:
        """That call is over; `result` is None where the tool gave none."""
        place = self._places[tool.name]
        place.running -= 1
        if result is not None and _frees(tool):
            place.ran.append(Ran.of(call, result))

    async def park(self) -> None:
        """The episode waits for long: what it does not use now is for others."""
        self._parked = True
        await self.free_idle()

    def unpark(self) -> None:
        self._parked = False

    async def free_idle(self, besides: str = "") -> None:
        """While the episode is parked, closes sessions that run nothing and can be made again, but for that of the tool
        `besides`."""
        if not self._parked or self._keep:
            return
        for name, place in self._places.items():
            if place.ran and not place.running and name != besides:
                async with place.opening:
                    if not place.running and place.session is not None:
                        place.session = None
                        await place.stack.aclose()

    async def close(self) -> None:
        async with AsyncExitStack() as every:  # one that raises keeps no other from being closed
            for place in self._places.values():
                every.push_async_callback(place.stack.aclose)


def _frees(tool: Tool) -> bool:
    return bool(getattr(tool, "frees_when_parked", False))
