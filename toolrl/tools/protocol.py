"""What a tool is.

A tool is made once per rollout worker and opened once per episode, at the episode's first call to it. Its session keeps
whatever state the episode has and is closed with the episode.

Invariants:
- A call never raises for what the model did wrong: that is a `ToolResult` whose status and text say it.
- A call raises `InfraError` when the tool's own machinery died. The model never sees that and is never scored for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from toolrl.config import ToolConfig
from toolrl.registry import Registry
from toolrl.trajectory import ToolCall, ToolResult, ToolStatus

# {"type": "function", "function": {"name": …, "description": …, "parameters": JSON schema}}
ToolSchema = dict[str, Any]


class InfraError(RuntimeError):
    """A tool's machinery died. The episode ends as `infra_error` and its place in the group is filled again."""


class ToolSession(Protocol):
    """One episode's tool."""

    async def call(self, call: ToolCall) -> ToolResult:
        """The result of one call whose arguments fit the schema. Calls of one session may overlap."""


class Tool(Protocol):
    """One tool of a rollout worker.

    The toolbox ends a call after `timeout_s`, unless the tool has a true attribute `keeps_own_deadline` (its calls may
    wait in a queue, say, which is not the model's time) and promises to end them itself.

    When an episode is continued elsewhere, its recorded calls are run again for their state. A tool with a true
    attribute `keeps_no_state` is left out of that: its recorded results stand.

    A session of a tool with a true attribute `frees_when_parked` holds something scarce. It is closed while the episode
    waits for another tool, and a fresh one is brought to its state, by the same calls, when it is needed again.

    A session may be entered, used and left in different tasks.
    """

    name: str
    schema: ToolSchema
    timeout_s: float

    def session(self, episode_id: str) -> AbstractAsyncContextManager[ToolSession]: ...


class Execution(Protocol):
    """What an interpreter says about one run of code."""

    @property
    def status(self) -> ToolStatus: ...
    @property
    def stdout(self) -> str: ...
    @property
    def stderr(self) -> str:
        """Error output; a traceback, trimmed to the user's frames, comes last."""

    @property
    def value(self) -> str | None:
        """The repr of the last expression."""

    @property
    def truncated(self) -> bool: ...
    @property
    def exit_code(self) -> int | None: ...
    @property
    def wall_s(self) -> float: ...
    @property
    def queue_s(self) -> float: ...
    @property
    def cpu_s(self) -> float: ...
    @property
    def stdout_bytes(self) -> int:
        """Printed, before anything was cut."""

    @property
    def stderr_bytes(self) -> int: ...
    @property
    def state_lost(self) -> bool: ...
    @property
    def note(self) -> str:
        """For people: why it ended as it did."""


class InterpreterSession(Protocol):
    """An interpreter whose variables live as long as the session."""

    async def run(self, code: str, *, timeout_s: float) -> Execution: ...
    async def put(self, name: str, data: bytes) -> None:
        """Writes a file of the folder in which code runs."""

    async def release(self) -> None: ...


class Interpreter(Protocol):
    """Where interpreter sessions come from: what the tool `python` needs, and what the sandbox's pool is."""

    async def acquire(self, *, episode_id: str) -> InterpreterSession: ...


class ToolMaker(Protocol):
    """Makes a tool, or several, from the settings; the interpreter is there for the tools that run code.

    A tool may have a coroutine method `close`, which ends what it keeps between episodes.
    """

    def __call__(self, config: ToolConfig, interpreter: Interpreter | None) -> Tool | Sequence[Tool]: ...


tools: Registry[ToolMaker] = Registry("tool")


def function_schema(name: str, description: str, parameters: dict[str, str]) -> ToolSchema:
    """The schema of a function whose parameters are all required text: name -> description."""
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        },
    }
