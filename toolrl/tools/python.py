"""The tool `python`: code runs in the sandbox, in one interpreter session that lives as long as the episode.

The interpreter is acquired at the first call. `text_of` alone decides what the model sees of a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from toolrl.config import ToolConfig
from toolrl.errors import UserError
from toolrl.registry import nearest
from toolrl.tools.protocol import (
    Execution,
    InfraError,
    Interpreter,
    InterpreterSession,
    ToolSchema,
    function_schema,
    tools,
)
from toolrl.trajectory import ToolCall, ToolResult

DESCRIPTION = (
    "Run Python code. Variables persist between calls. Returns what is printed and the value of the last expression."
)
STATE_LOST = "The interpreter restarted; variables are gone."


@tools.register("python")
def python(config: ToolConfig, interpreter: Interpreter | None) -> PythonTool:
    """Options: `description`; `error_lines`, the lines of an error that the model sees, counted from its end; `files`, a
    folder whose files lie in every episode's work folder."""
    if interpreter is None:
        raise UserError("the tool 'python' needs an interpreter: pass a sandbox pool, or use 'calculator'")
    known = ("description", "error_lines", "files")
    for option in config.options:
        if option not in known:
            raise UserError(f"tool 'python' has no option {option!r}{nearest(option, list(known))}")
    return PythonTool(interpreter, timeout_s=config.timeout_s, **config.options)


class PythonTool:
    """Code in a sandbox."""

    name = "python"
    keeps_own_deadline = True  # the sandbox keeps it, and tells the wait for a free core apart from the run
    frees_when_parked = True  # a box

    def __init__(
        self,
        interpreter: Interpreter,
        *,
        timeout_s: float,
        description: str = DESCRIPTION,
        error_lines: int = 12,
        files: str | None = None,
    ) -> None:
        if error_lines < 1:
            raise UserError(f"tool 'python': error_lines={error_lines} must be at least 1")
        self.timeout_s = timeout_s
        self.schema: ToolSchema = function_schema(self.name, description, {"code": "Python code"})
        self._interpreter = interpreter
        self._error_lines = error_lines
        self._files = {} if files is None else read_files(Path(files))

    @asynccontextmanager
    async def session(self, episode_id: str) -> AsyncIterator[PythonSession]:
        try:
            interpreter = await self._interpreter.acquire(episode_id=episode_id)
        except Exception as error:
            raise InfraError(f"no interpreter for episode {episode_id}: {type(error).__name__}: {error}") from error
        try:
            for name, data in self._files.items():
                try:
                    await interpreter.put(name, data)
                except Exception as error:
                    raise InfraError(f"{name} could not be put into the sandbox: {error}") from error
            yield PythonSession(interpreter, self.timeout_s, self._error_lines)
        finally:
            await interpreter.release()


class PythonSession:
    """One episode's interpreter. Calls that overlap run one after the other, in the order in which they came."""

    def __init__(self, interpreter: InterpreterSession, timeout_s: float, error_lines: int) -> None:
        self._interpreter = interpreter
        self._timeout_s = timeout_s
        self._error_lines = error_lines
        self._running = asyncio.Lock()

    async def call(self, call: ToolCall) -> ToolResult:
        try:
            async with self._running:
                run = await self._interpreter.run(call.arguments["code"], timeout_s=self._timeout_s)
        except Exception as error:
            raise InfraError(f"the interpreter failed: {type(error).__name__}: {error}") from error
        if run.status == "infra_error":
            raise InfraError(f"the interpreter failed: {run.note or 'no reason given'}")
        return ToolResult(
            call_id=call.id,
            name=call.name,
            status=run.status,
            text=text_of(run, timeout_s=self._timeout_s, error_lines=self._error_lines),
            truncated=run.truncated,
            wall_s=run.wall_s,
            queue_s=run.queue_s,
            cpu_s=run.cpu_s,
            output_bytes=run.stdout_bytes + run.stderr_bytes,
        )


def read_files(folder: Path) -> dict[str, bytes]:
    """Path below the folder → content, of all regular files. Raises UserError where there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"tool 'python': files={folder} is no folder")
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def text_of(run: Execution, *, timeout_s: float, error_lines: int) -> str:
    """A run as the model sees it: what it printed, its value, its error, and whether its variables are gone."""
    parts = [run.stdout.rstrip("\n")]
    if run.value is not None:
        parts.append(run.value.rstrip("\n"))
    if run.stderr.strip():
        parts.append("\n".join(run.stderr.strip("\n").splitlines()[-error_lines:]))
    died = "" if run.exit_code is None else f" with exit code {run.exit_code}"
    sentences = {
        "timeout": f"Error: the code did not finish within {timeout_s:g} s",
        "oom": "Error: the code used up its memory",
        "output_limit": "Error: the code printed too much and was stopped",
        "died": f"Error: the interpreter ended{died}",
        "protocol_violation": "Error: the code disturbed the interpreter and was stopped",
        # The traceback has said it, unless there is none.
        "error": "" if run.stderr.strip() else "Error: the code failed",
    }
    parts.append(sentences.get(run.status, ""))
    if run.state_lost:
        parts.append(STATE_LOST)
    return "\n".join(part for part in parts if part) or "(no output)"
