"""A tool that sleeps until a file appears, and a policy that calls it first and then answers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from toolrl.config import ToolConfig
from toolrl.toolcalls import Parsed, call_id
from toolrl.toolcalls.hermes import Hermes
from toolrl.tools import function_schema
from toolrl.trajectory import ToolCall, ToolResult

LOOK_AGAIN_S = 0.5


class Sleepy:
    """Keeps no state; one of all its calls looks for the file, the others sleep beside it."""

    name = "sleepy"
    keeps_no_state = True
    schema = function_schema("sleepy", "Sleeps.", {})

    def __init__(self, config: ToolConfig, interpreter: Any) -> None:
        self.timeout_s = config.timeout_s
        self.alarm = Path(config.options["alarm"])

    @asynccontextmanager
    async def session(self, episode_id: str) -> Any:
        yield self

    async def call(self, call: ToolCall) -> ToolResult:
        while not self.alarm.exists():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_AGAIN_S)
        return ToolResult(call.id, call.name, "ok", "good morning")


class SleepyEager(Hermes):
    """Reads the first turn as a call of `sleepy`, whatever stands in it, and the second as an answer."""

    name = "sleepy"

    def parse(self, text: str, first_call: int = 0) -> Parsed:
        return Parsed(text) if first_call else Parsed(text, [ToolCall(call_id(0), "sleepy", {})])
