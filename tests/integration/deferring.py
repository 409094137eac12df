"""A tool that takes as long as it is told, and a policy that defers it twice, calls another and then waits."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

from toolrl.config import ToolConfig
from toolrl.toolcalls import Parsed, call_id
from toolrl.toolcalls.hermes import Hermes
from toolrl.tools import function_schema
from toolrl.trajectory import ToolCall, ToolResult

SOON_S, NEVER_S = "0.3", "60"


class Waiting:
    """Keeps no state."""

    name = "waiting"
    keeps_no_state = True
    schema = function_schema("waiting", "Waits.", {"seconds": "how many"})

    def __init__(self, config: ToolConfig, interpreter: Any) -> None:
        self.timeout_s = config.timeout_s

    @asynccontextmanager
    async def session(self, episode_id: str) -> Any:
        yield self

    async def call(self, call: ToolCall) -> ToolResult:
        await asyncio.sleep(float(call.arguments["seconds"]))
        return ToolResult(call.id, call.name, "ok", "here")


class Deferring(Hermes):
    """Reads its turns as these calls in order, whatever stands in them, and the turns after as words."""

    name = "deferring"
    calls = (
        ("waiting", {"seconds": SOON_S}),
        ("waiting", {"seconds": NEVER_S}),
        ("calculator", {"expression": "17 * 24"}),
    )

    def parse(self, text: str, first_call: int = 0) -> Parsed:
        if first_call >= len(self.calls):
            return Parsed(text)
        name, arguments = self.calls[first_call]
        return Parsed(text, [ToolCall(call_id(first_call), name, dict(arguments))])

    def format_state(self, text: str, finish_reason: str) -> Any:
        return "healthy_answer"
