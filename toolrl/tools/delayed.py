"""A tool that takes longer: a drawn wait before each call, within the call's own limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from toolrl.tools.latency import HeavyTail
from toolrl.tools.protocol import Tool, ToolSession
from toolrl.tools.wording import timed_out
from toolrl.trajectory import ToolCall, ToolResult


class Delayed:
    """`tool` behind a wait that is drawn for each call from its episode and id."""

    def __init__(self, tool: Tool, delay: HeavyTail) -> None:
        self.name = tool.name
        self.schema = tool.schema
        self.timeout_s = tool.timeout_s
        self.keeps_no_state = getattr(tool, "keeps_no_state", False)
        self.keeps_own_deadline = getattr(tool, "keeps_own_deadline", False)
        self.frees_when_parked = getattr(tool, "frees_when_parked", False)
        self.tool = tool
        self.delay = delay

    @asynccontextmanager
    async def session(self, episode_id: str) -> AsyncIterator[DelayedSession]:
        async with self.tool.session(episode_id) as session:
            yield DelayedSession(self, session, episode_id)

    async def close(self) -> None:
        close = getattr(self.tool, "close", None)
        if close is not None:
            await close()


class DelayedSession:
    """One episode's. A wait as long as the tool's limit is the call's end: the tool is not asked any more.

    Calls that overlap wait one after the other, so that a tool with state runs them in the order in which they came.
    """

    def __init__(self, delayed: Delayed, session: ToolSession, episode_id: str) -> None:
        self._delayed = delayed
        self._session = session
        self._episode_id = episode_id
        self._in_order = contextlib.nullcontext() if delayed.keeps_no_state else asyncio.Lock()

    async def call(self, call: ToolCall) -> ToolResult:
        async with self._in_order:
            return await self._call(call)

    async def _call(self, call: ToolCall) -> ToolResult:
        wait_s = self._delayed.delay.draw(f"{self._episode_id}/{call.id}")
        limit_s = self._delayed.timeout_s
        await asyncio.sleep(min(wait_s, limit_s))
        if wait_s >= limit_s:
            text = timed_out(call.name, limit_s)
            return ToolResult(call_id=call.id, name=call.name, status="timeout", text=text, wall_s=limit_s)
        result = await self._session.call(call)
        if result.wall_s:  # else the toolbox measures, the wait included
            result.wall_s += wait_s
        return result
