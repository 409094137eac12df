"""The tools of a run as one thing: looks a call up, checks its arguments, keeps its deadline, and closes what an
episode opened.

Invariants:
- Whatever the model wrote gives a `ToolResult`; only `InfraError` and cancellation are raised.
- A tool's session is opened at the episode's first valid call to it and closed with the episode.
- Failures on purpose (`failure_rate`) depend on (seed, episode, number of the call) alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from toolrl.config import ToolConfig
from toolrl.errors import UserError
from toolrl.registry import nearest
from toolrl.tools.arguments import ArgumentCheck
from toolrl.tools.protocol import InfraError, Interpreter, Tool, ToolSchema, ToolSession, tools
from toolrl.trajectory import ToolCall, ToolResult, ToolStatus

# What services say when they are overloaded: nothing that the model did, and gone at the next try.
TRANSIENT_ERRORS = (
    "Error: {name} busy, try again",
    "Error: connection to {name} was reset, try again",
    "Error: {name} is temporarily unavailable (503), try again",
)


class Toolbox:
    """The tools of one rollout worker."""

    def __init__(self, entries: Sequence[tuple[Tool, ToolConfig]], seed: int) -> None:
        self._tools: dict[str, Tool] = {}
        self._checks: dict[str, ArgumentCheck] = {}
        self._failure_rates: dict[str, float] = {}
        self._seed = seed
        for tool, config in entries:
            if tool.name in self._tools:
                raise UserError(f"two tools are called {tool.name!r}; remove one from tools")
            if not 0 <= config.failure_rate <= 1:
                raise UserError(f"tool {config.name!r}: failure_rate {config.failure_rate} is not between 0 and 1")
            self._tools[tool.name] = tool
            self._checks[tool.name] = ArgumentCheck(tool.schema)
            self._failure_rates[tool.name] = config.failure_rate

    @classmethod
    def build(cls, configs: Sequence[ToolConfig], interpreter: Interpreter | None, seed: int) -> Toolbox:
        """The tools that `configs` name. Raises UserError or UnknownName for a setting that cannot work."""
        return cls([(tools.get(config.name)(config, interpreter), config) for config in configs], seed)

    @property
    def schemas(self) -> list[ToolSchema]:
        return [tool.schema for tool in self._tools.values()]

    @asynccontextmanager
    async def session(self, episode_id: str) -> AsyncIterator[ToolboxSession]:
        """One episode's tools; leaving closes those that were opened."""
        async with AsyncExitStack() as opened:
            yield ToolboxSession(self, episode_id, opened)


class ToolboxSession:
    """One episode's tools. Made by `Toolbox.session`."""

    def __init__(self, toolbox: Toolbox, episode_id: str, opened: AsyncExitStack) -> None:
        self._toolbox = toolbox
        self._episode_id = episode_id
        self._opened = opened
        self._sessions: dict[str, ToolSession] = {}
        self._opening = asyncio.Lock()
        self._calls = 0

    async def call(self, call: ToolCall) -> ToolResult:
        """The result of one call. Raises InfraError when a tool's machinery died."""
        number = self._calls
        self._calls += 1
        box = self._toolbox
        tool = box._tools.get(call.name)
        if tool is None:
            return _result(
                call, "invalid_call", f"Error: unknown tool {call.name!r}{nearest(call.name, list(box._tools))}"
            )
        wrong = box._checks[call.name].error(call.arguments)
        if wrong is not None:
            return _result(call, "invalid_call", f"Error: {call.name}: {wrong}")
        failure = self._drawn_failure(call.name, number)
        if failure is not None:
            return _result(call, "error", failure)
        return await self._run(tool, call)

    async def _run(self, tool: Tool, call: ToolCall) -> ToolResult:
        started = time.monotonic()
        deadline_s = None if getattr(tool, "keeps_own_deadline", False) else tool.timeout_s
        deadline = asyncio.timeout(deadline_s)
        try:
            session = await self._session(tool)
            async with deadline:
                result = await session.call(call)
        except InfraError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                text = f"Error: {tool.name} did not finish within {tool.timeout_s:g} s"
                return _result(call, "timeout", text, time.monotonic() - started)
            # A tool answers for the model's mistakes with a result; an exception is a defect of the tool.
            raise InfraError(f"tool {tool.name!r} raised {type(error).__name__}: {error}") from error
        if result.status == "infra_error":
            raise InfraError(f"tool {tool.name!r} reports infra_error: {result.text}")
        result.wall_s = result.wall_s or time.monotonic() - started
        return result

    async def _session(self, tool: Tool) -> ToolSession:
        async with self._opening:
            if tool.name not in self._sessions:
                session = await self._opened.enter_async_context(tool.session(self._episode_id))
                self._sessions[tool.name] = session
            return self._sessions[tool.name]

    def _drawn_failure(self, name: str, number: int) -> str | None:
        rate = self._toolbox._failure_rates[name]
        if not rate:
            return None
        key = f"{self._toolbox._seed}/{self._episode_id}/{number}"
        draw = random.Random(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))
        return draw.choice(TRANSIENT_ERRORS).format(name=name) if draw.random() < rate else None


def _result(call: ToolCall, status: ToolStatus, text: str, wall_s: float = 0.0) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, status=status, text=text, wall_s=wall_s)
