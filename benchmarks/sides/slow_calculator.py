"""The calculator with a latency of its own, which can be switched off while a run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from toolrl.config import ToolConfig
from toolrl.tools.calculator import Calculator
from toolrl.tools.latency import HeavyTail
from toolrl.tools.protocol import Interpreter
from toolrl.trajectory import ToolCall, ToolResult


def slow_calculator(config: ToolConfig, interpreter: Interpreter | None) -> SlowCalculator:
    """Options: `latency`, {mean_s, p99_s}; `at_once`, a file: while it exists, calls take no time."""
    options = config.options
    return SlowCalculator(HeavyTail.of(options["latency"]), Path(options["at_once"]), timeout_s=config.timeout_s)


class SlowCalculator(Calculator):
    """Waits before it answers; a call's latency is that of its episode and number, in every run."""

    def __init__(self, latency: HeavyTail, at_once: Path, *, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self.latency = latency
        self.at_once = at_once

    @asynccontextmanager
    async def session(self, episode_id: str) -> AsyncIterator[Calculator]:
        yield _Episode(self, episode_id)


class _Episode(Calculator):
    def __init__(self, tool: SlowCalculator, episode_id: str) -> None:
        super().__init__(timeout_s=tool.timeout_s)
        self.tool = tool
        self.episode_id = episode_id
        self.calls = 0

    async def call(self, call: ToolCall) -> ToolResult:
        self.calls += 1
        if not self.tool.at_once.exists():
            await asyncio.sleep(self.tool.latency.draw(f"{self.episode_id}/{self.calls}"))
        return await super().call(call)
