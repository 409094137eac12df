"""A tool under other names: what the policy reads and writes changes, what the tool does does not."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from toolrl.errors import UserError
from toolrl.registry import nearest
from toolrl.tools.protocol import Tool, ToolSchema, ToolSession
from toolrl.trajectory import ToolCall, ToolResult


class Renamed:
    """`tool` as the policy knows it: by `name`, with arguments of other names.

    Args:
        arguments: the tool's own name of an argument -> the policy's.

    Raises:
        UserError: the tool has no such argument, or two arguments would share a name.
    """

    def __init__(self, tool: Tool, name: str, arguments: Mapping[str, str]) -> None:
        self.name = name
        self.timeout_s = tool.timeout_s
        self.schema = renamed_schema(tool.schema, name, arguments)
        self.keeps_no_state = getattr(tool, "keeps_no_state", False)
        self.keeps_own_deadline = getattr(tool, "keeps_own_deadline", False)
        self.frees_when_parked = getattr(tool, "frees_when_parked", False)
        self.tool = tool
        self.own_names = {theirs: own for own, theirs in arguments.items()}

    @asynccontextmanager
    async def session(self, episode_id: str) -> AsyncIterator[RenamedSession]:
        async with self.tool.session(episode_id) as session:
            yield RenamedSession(self, session)

    async def close(self) -> None:
        close = getattr(self.tool, "close", None)
        if close is not None:
            await close()


class RenamedSession:
    """One episode's: calls go in under the tool's own names, results come out under the policy's."""

    def __init__(self, renamed: Renamed, session: ToolSession) -> None:
        self._renamed = renamed
        self._session = session

    async def call(self, call: ToolCall) -> ToolResult:
        arguments = {self._renamed.own_names.get(key, key): value for key, value in call.arguments.items()}
        result = await self._session.call(ToolCall(call.id, self._renamed.tool.name, arguments))
        return dataclasses.replace(result, name=call.name)


def renamed(tool: Tool, names: Mapping[str, str]) -> Tool:
    """`tool` under the names that `ToolConfig.rename` gives it: `{tool: name, tool.argument: name}`.

    Names of other tools are passed over: one entry of the config may make several tools.
    """
    prefix = f"{tool.name}."
    arguments = {key.removeprefix(prefix): name for key, name in names.items() if key.startswith(prefix)}
    if tool.name not in names and not arguments:
        return tool
    return Renamed(tool, names.get(tool.name, tool.name), arguments)


def unknown_names(made: list[Tool], names: Mapping[str, str]) -> str | None:
    """The first key of `ToolConfig.rename` that names none of the tools made; its argument is checked by `Renamed`."""
    known = [tool.name for tool in made]
    for key in names:
        if not any(key == name or key.startswith(f"{name}.") for name in known):
            return f"{key!r}{nearest(key, known)}"
    return None


def renamed_schema(schema: ToolSchema, name: str, arguments: Mapping[str, str]) -> ToolSchema:
    """The schema under other names. Raises UserError for an argument it does not have, or a name that is taken."""
    changed: dict[str, Any] = copy.deepcopy(schema)
    function = changed["function"]
    own = function["name"]
    function["name"] = name
    parameters = function.get("parameters", {})
    properties = parameters.get("properties", {})
    for argument in arguments:
        if argument not in properties:
            raise UserError(f"tool {own!r} has no argument {argument!r} to rename{nearest(argument, list(properties))}")
    shown = [arguments.get(key, key) for key in properties]
    if len(set(shown)) < len(shown):
        raise UserError(f"tool {own!r}: two arguments would have one name ({', '.join(shown)}); choose others")
    if "properties" in parameters:
        parameters["properties"] = dict(zip(shown, properties.values(), strict=True))
    if "required" in parameters:
        parameters["required"] = [arguments.get(key, key) for key in parameters["required"]]
    return changed
