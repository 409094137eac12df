"""A tool whose results come when the script says so, and the script that says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from actors.engine import Generated
from tests.episodes import Script
from toolrl.app.tiny_tokenizer import END
from toolrl.config import ToolConfig
from toolrl.tools import InfraError, function_schema
from toolrl.trajectory import ToolResult, Trajectory

SLOW = f"{__name__}:Slow"


class Slow:
    """Answers a call once its word has been released, by the word itself; keeps no state."""

    name = "slow"
    keeps_no_state = True
    schema = function_schema("slow", "Takes its time.", {"expression": "a word"})
    gates: dict[str, asyncio.Event] = {}  # noqa: RUF012
    called: list[str] = []  # noqa: RUF012
    cancelled: list[str] = []  # noqa: RUF012

    def __init__(self, config: ToolConfig, interpreter: Any) -> None:
        self.timeout_s = config.timeout_s
        Slow.gates, Slow.called, Slow.cancelled = {}, [], []

    @asynccontextmanager
    async def session(self, episode_id: str) -> Any:
        yield self

    async def call(self, call: Any) -> ToolResult:
        word = call.arguments["expression"]
        Slow.called.append(word)
        try:
            await Slow.gates.setdefault(word, asyncio.Event()).wait()
        except asyncio.CancelledError:
            Slow.cancelled.append(word)
            raise
        if word.startswith("die"):
            raise InfraError("the machine is gone")
        return ToolResult(call.id, call.name, "error" if word.startswith("bad") else "ok", f"came: {word}")


def release(*words: str) -> None:
    for word in words:
        Slow.gates.setdefault(word, asyncio.Event()).set()


def deferred(**settings: Any) -> ToolConfig:
    return ToolConfig(SLOW, **{"mode": "deferred", "timeout_s": 60.0, **settings})


def calls(*asked: tuple[str, str], text: str = "") -> str:
    """A turn that calls (tool, word), …"""
    said = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"expression": "{word}"}}}}\n</tool_call>'
        for name, word in asked
    ]
    return "\n".join([*([text] if text else []), *said]) + END


@dataclass
class Timed(Script):
    """While turn n is sampled, the words of `releases[n]` come: each group at one moment, a group after the other."""

    releases: Sequence[Sequence[Sequence[str]]] = ()
    shown: list[int] = field(default_factory=list)

    async def generate(self, prompt_ids: list[int], *, max_tokens: int, **how: Any) -> Generated:
        number = len(self.asked)
        for group in self.releases[number] if number < len(self.releases) else ():
            release(*group)
            for _ in range(8):  # rounds of the event loop from a release to its arrival
                await asyncio.sleep(0)
        await asyncio.sleep(0)  # calls of the turn before have begun
        return await super().generate(prompt_ids, max_tokens=max_tokens, **how)


def shown(trajectory: Trajectory) -> list[list[tuple[str, str]]]:
    """(call id, status) of each tool turn."""
    return [[(r.call_id, r.status) for r in turn.results] for turn in trajectory.turns if turn.kind == "tool"]
