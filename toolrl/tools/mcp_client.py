"""The tools of an MCP server (Model Context Protocol), through the official SDK: over stdio or streamable HTTP.

One entry `mcp` in the config gives as many tools as the server has. All episodes of a worker share one connection, so
whatever a server keeps between calls it keeps for all of them: a recorded result stands, no call is made twice.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from toolrl.config import ToolConfig
from toolrl.errors import UserError
from toolrl.registry import nearest
from toolrl.tools.mcp_connection import McpConnection, OpenClient, list_tools
from toolrl.tools.protocol import Interpreter, ToolSchema, tools
from toolrl.tools.wording import timed_out
from toolrl.trajectory import ToolCall, ToolResult, ToolStatus

_OPTIONS = ("command", "url", "env", "cwd", "tools", "prefix", "connect_s")


@tools.register("mcp")
def mcp(config: ToolConfig, interpreter: Interpreter | None) -> list[McpTool]:
    """Options: `command`, the words that start a server, or `url` of one that runs; `env` and `cwd` of the command; `tools`,
    the names wanted (all); `prefix` before their names; `connect_s` (10)."""
    for option in config.options:
        if option not in _OPTIONS:
            raise UserError(f"tool 'mcp' has no option {option!r}{nearest(option, list(_OPTIONS))}")
    options = config.options
    name, open_client = _client(options)
    connect_s = float(options.get("connect_s", 10.0))
    offered = {tool.name: tool for tool in list_tools(name, open_client, connect_s)}
    wanted = list(options.get("tools") or offered)
    for tool in wanted:
        if tool not in offered:
            raise UserError(f"tool 'mcp': server {name!r} has no tool {tool!r}{nearest(tool, list(offered))}")
    connection = McpConnection(name, open_client, connect_s=connect_s)
    prefix = str(options.get("prefix", ""))
    return [McpTool(connection, offered[tool], prefix, config.timeout_s) for tool in wanted]


def _client(options: Mapping[str, Any]) -> tuple[str, OpenClient]:
    """What the server is called, and how to reach it."""
    command, url = options.get("command"), options.get("url")
    if (command is None) == (url is None):
        raise UserError("tool 'mcp' needs either command (a list of words) or url")
    try:
        from mcp import Client, StdioServerParameters
    except ImportError as error:
        raise UserError("tool 'mcp' needs the MCP SDK: pip install 'toolrl[tools]'") from error
    if url is not None:
        return str(url), lambda: Client(str(url))
    if isinstance(command, str) or not isinstance(command, Sequence) or not command:
        raise UserError(f"tool 'mcp': command must be a list of words, such as [uvx, my-server], not {command!r}")
    words = [str(word) for word in command]
    env = {str(key): str(value) for key, value in dict(options.get("env") or {}).items()}
    server = StdioServerParameters(command=words[0], args=words[1:], env=env, cwd=options.get("cwd"))
    return " ".join(words), lambda: Client(server)


class McpTool:
    """One tool of a server."""

    keeps_no_state = True  # none of an episode's own
    keeps_own_deadline = True  # a server that has to be started again takes its time

    def __init__(self, connection: McpConnection, offered: Any, prefix: str, timeout_s: float) -> None:
        self.name = prefix + offered.name
        self.timeout_s = timeout_s
        self.schema = schema_of(self.name, offered)
        self.connection = connection
        self._name = offered.name

    @asynccontextmanager
    async def session(self, episode_id: str) -> AsyncIterator[McpTool]:
        yield self

    async def call(self, call: ToolCall) -> ToolResult:
        from mcp import MCPError

        try:
            answer = await self.connection.call(self._name, call.arguments, self.timeout_s)
        except TimeoutError:
            text = timed_out(self.name, self.timeout_s)
            return ToolResult(call_id=call.id, name=call.name, status="timeout", text=text)
        except MCPError as error:  # the server is there and says no
            return ToolResult(call_id=call.id, name=call.name, status="error", text=f"Error: {error}")
        status: ToolStatus = "error" if answer.is_error else "ok"
        return ToolResult(call_id=call.id, name=call.name, status=status, text=text_of(answer))

    async def close(self) -> None:
        await self.connection.close()


def schema_of(name: str, offered: Any) -> ToolSchema:
    """A tool as the server lists it, as a function's schema."""
    description = inspect.cleandoc(offered.description or offered.title or "").strip()
    parameters = dict(offered.input_schema or {"type": "object", "properties": {}})
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def text_of(answer: Any) -> str:
    """A result as the model sees it: its texts; what is no text is named."""
    parts = []
    for part in answer.content:
        if part.type == "text":
            parts.append(part.text)
        elif part.type == "resource" and getattr(part.resource, "text", None) is not None:
            parts.append(part.resource.text)
        else:
            parts.append(f"({part.type}: {getattr(part, 'mime_type', None) or 'not shown'})")
    if not parts and answer.structured_content is not None:
        parts.append(json.dumps(answer.structured_content, ensure_ascii=False))
    return "\n".join(parts) or "(no output)"
