"""The tools of a run as one thing: looks a call up, checks its arguments, keeps its limits, defers its result where its
tool is deferred, and closes what an episode opened.

Invariants:
- Whatever the model wrote gives a `ToolResult`; only `InfraError` and cancellation are raised.
- A tool's session is opened at the episode's first valid call to it and closed with the episode.
- Failures on purpose (`failure_rate`) depend on (seed, episode, number of the call) alone; what was recorded of an
  episode that is continued elsewhere is never drawn again.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from toolrl.config import ToolConfig
from toolrl.errors import UserError
from toolrl.registry import nearest
from toolrl.tools.arguments import ArgumentCheck
from toolrl.tools.delayed import Delayed
from toolrl.tools.latency import HeavyTail
from toolrl.tools.open_sessions import OpenSessions
from toolrl.tools.protocol import InfraError, Interpreter, Tool, ToolSchema, tools
from toolrl.tools.renamed import renamed, unknown_names
from toolrl.tools.under_way import CallsUnderWay
from toolrl.tools.wording import receipt, timed_out
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
        self._configs: dict[str, ToolConfig] = {}
        self._seed = seed
        for tool, config in entries:
            if tool.name in self._tools:
                raise UserError(f"two tools are called {tool.name!r}; remove one from tools")
            if not 0 <= config.failure_rate <= 1:
                raise UserError(f"tool {config.name!r}: failure_rate {config.failure_rate} is not between 0 and 1")
            self._tools[tool.name] = tool
            self._checks[tool.name] = ArgumentCheck(tool.schema)
            self._configs[tool.name] = config

    @classmethod
    def build(cls, configs: Sequence[ToolConfig], interpreter: Interpreter | None, seed: int) -> Toolbox:
        """The tools that `configs` name. Raises UserError or UnknownName for a setting that cannot work."""
        entries: list[tuple[Tool, ToolConfig]] = []
        for config in configs:
            made = tools.get(config.name)(config, interpreter)
            entries += [
                (tool, config) for tool in _as_asked(list(made) if isinstance(made, Sequence) else [made], config)
            ]
        return cls(entries, seed)

    @property
    def schemas(self) -> list[ToolSchema]:
        return [tool.schema for tool in self._tools.values()]

    @asynccontextmanager
    async def session(self, episode_id: str, *, keep_when_parked: bool = False) -> AsyncIterator[ToolboxSession]:
        """One episode's tools; leaving ends its calls and closes what it opened.

        Args:
            keep_when_parked: nothing is freed while the episode waits (see `Tool.frees_when_parked`).
        """
        session = ToolboxSession(self, episode_id, keep_when_parked=keep_when_parked)
        try:
            yield session
        finally:
            await session.close()

    async def close(self) -> None:
        """Ends what the tools keep between episodes."""
        for tool in self._tools.values():
            close = getattr(tool, "close", None)
            if close is not None:
                await close()


class ToolboxSession:
    """One episode's tools. Made by `Toolbox.session`."""

    def __init__(self, toolbox: Toolbox, episode_id: str, *, keep_when_parked: bool) -> None:
        self.sessions = OpenSessions(episode_id, keep_when_parked=keep_when_parked)
        self.under_way = CallsUnderWay()
        self._toolbox = toolbox
        self._episode_id = episode_id
        self._calls = 0

    async def call(self, call: ToolCall) -> ToolResult:
        """The result of one call, or the receipt of a deferred one. Raises InfraError when a tool's machinery died."""
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
            result = _result(call, "error", failure)
            result.injected = True
            return result
        config = box._configs[call.name]
        await self.sessions.free_idle(besides=call.name)
        answer = self.under_way.begin(call, self._run(tool, call), config.deadline_s)
        if config.mode == "await":
            return await answer
        self.under_way.deliver_later(call, answer)
        return _result(call, "pending", receipt(call.id, call.name))

    async def replay(self, call: ToolCall, recorded: ToolResult) -> ToolResult | None:
        """Runs the next call of an earlier episode again, for the state that it leaves behind.

        Nothing is drawn: a call that failed on purpose then has failed now. None where no tool was run, or one that
        keeps no state: the recorded result stands. Raises InfraError.
        """
        self._calls += 1
        tool = self._toolbox._tools.get(call.name)
        if recorded.injected or recorded.status == "invalid_call" or tool is None:
            return None
        return None if getattr(tool, "keeps_no_state", False) else await self._run(tool, call)

    def make_again(self, call: ToolCall) -> None:
        """Makes the next call of an earlier episode, whose result had not been delivered; it will be."""
        self._calls += 1
        tool = self._toolbox._tools.get(call.name)
        if tool is not None:
            answer = self.under_way.begin(call, self._run(tool, call), self._toolbox._configs[call.name].deadline_s)
            self.under_way.deliver_later(call, answer)

    async def close(self) -> None:
        """Ends what is under way, then closes what was opened."""
        try:
            await self.under_way.close()
        finally:
            await self.sessions.close()

    async def _run(self, tool: Tool, call: ToolCall) -> ToolResult:
        started = time.monotonic()
        deadline_s = None if getattr(tool, "keeps_own_deadline", False) else tool.timeout_s
        deadline = asyncio.timeout(deadline_s)
        result: ToolResult | None = None
        self.sessions.begin(tool)
        try:
            session = await self.sessions.opened(tool)
            async with deadline:
                result = await session.call(call)
        except InfraError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                text = timed_out(tool.name, tool.timeout_s)
                result = _result(call, "timeout", text, time.monotonic() - started)
                return result
            # A tool answers for the model's mistakes with a result; an exception is a defect of the tool.
            raise InfraError(f"tool {tool.name!r} raised {type(error).__name__}: {error}") from error
        finally:
            self.sessions.end(tool, call, result)
        if result.status == "infra_error":
            raise InfraError(f"tool {tool.name!r} reports infra_error: {result.text}")
        result.wall_s = result.wall_s or time.monotonic() - started
        return result

    def _drawn_failure(self, name: str, number: int) -> str | None:
        rate = self._toolbox._configs[name].failure_rate
        if not rate:
            return None
        key = f"{self._toolbox._seed}/{self._episode_id}/{number}"
        draw = random.Random(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))
        return draw.choice(TRANSIENT_ERRORS).format(name=name) if draw.random() < rate else None


def _as_asked(made: list[Tool], config: ToolConfig) -> list[Tool]:
    """The tools of one entry of the config, as slow and under the names that it asks for."""
    if (unknown := unknown_names(made, config.rename)) is not None:
        raise UserError(f"tool {config.name!r}: rename has the unknown name {unknown}")
    delay = HeavyTail.of(config.delay) if config.delay else None
    shown = [renamed(tool, config.rename) for tool in made]
    return shown if delay is None else [Delayed(tool, delay) for tool in shown]


def _result(call: ToolCall, status: ToolStatus, text: str, wall_s: float = 0.0) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, status=status, text=text, wall_s=wall_s)
