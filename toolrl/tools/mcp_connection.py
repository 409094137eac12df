"""A connection to one MCP server, shared by the episodes of a worker.

Invariants:
- The SDK's client lives in one task, which opens and closes it; calls come from any task of the same event loop.
- A call that is under way when the server dies raises `InfraError`, at once. The next call connects again, at most `TRIES`
  times with growing pauses, then raises `InfraError` too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolrl.errors import UserError
from toolrl.tools.protocol import InfraError

log = logging.getLogger(__name__)

TRIES = 4
PAUSE_S = 0.25  # before the second try; doubled before each further one
CLOSE_S = 8.0  # the SDK gives a server 2 s after each of end of input, SIGTERM and SIGKILL

OpenClient = Callable[[], Any]  # an async context manager that gives an `mcp.Client`


@dataclass
class _Link:
    """A client that is connected as long as its owner runs."""

    client: Any
    owner: asyncio.Task[None]
    leave: asyncio.Event


class McpConnection:
    """`call` connects when it must; `close` in the end."""

    def __init__(self, name: str, open_client: OpenClient, *, connect_s: float) -> None:
        self.name = name
        self.connections = 0
        self._open_client = open_client
        self._connect_s = connect_s
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        """The server's `CallToolResult`. The time that it takes to connect is nobody's.

        Raises:
            TimeoutError: no result within `timeout_s`; the server has been told that nobody waits any more.
            mcp.MCPError: the server refused the call.
            InfraError: the server died, or cannot be reached.
        """
        from mcp import MCPError

        link = await self._linked()
        work = asyncio.create_task(link.client.call_tool(tool, arguments))
        try:
            await asyncio.wait({work, link.owner}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise self._lost(link, "it is gone") if link.owner.done() else TimeoutError
            try:
                return work.result()
            except asyncio.CancelledError:
                raise self._lost(link, "it ended the call") from None
            except MCPError as error:
                if not _is_lost(error):
                    raise
                raise self._lost(link, str(error)) from error
        finally:
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await work

    async def close(self) -> None:
        """Ends the connection, and the server if it was started for it."""
        link, self._link = self._link, None
        if link is not None:
            await _end(link)

    def _lost(self, link: _Link, why: str) -> InfraError:
        if self._link is link:
            self._link = None
            link.leave.set()
        return InfraError(f"MCP server {self.name!r}: {why}")

    async def _linked(self) -> _Link:
        async with self._connecting:
            if self._link is not None and not self._link.owner.done():
                return self._link
            why = ""
            for attempt in range(TRIES):
                if attempt:
                    await asyncio.sleep(PAUSE_S * 2 ** (attempt - 1))
                try:
                    self._link = await self._connect()
                    self.connections += 1
                    return self._link
                except InfraError as error:
                    why = str(error)
                    log.warning("MCP server %s, try %d of %d: %s", self.name, attempt + 1, TRIES, why)
            raise InfraError(f"MCP server {self.name!r} cannot be reached, tried {TRIES} times: {why}")

    async def _connect(self) -> _Link:
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        leave = asyncio.Event()
        owner = asyncio.create_task(self._own(ready, leave), name=f"MCP server {self.name}")
        await asyncio.wait({ready, owner}, timeout=self._connect_s, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            return _Link(ready.result(), owner, leave)
        why = f"no answer within {self._connect_s:g} s"
        if owner.done() and not owner.cancelled() and (error := owner.exception()) is not None:
            why = reason(error)
        owner.cancel()
        await asyncio.gather(owner, return_exceptions=True)
        raise InfraError(why)

    async def _own(self, ready: asyncio.Future[Any], leave: asyncio.Event) -> None:
        """Holds the client open. Whatever ends it ends the task, which is how the others learn of it."""
        try:
            async with self._open_client() as client:
                ready.set_result(client)
                await leave.wait()
        except Exception as error:
            if not ready.done():
                raise
            log.warning("MCP server %s: %s", self.name, reason(error))


async def _end(link: _Link) -> None:
    link.leave.set()
    _, late = await asyncio.wait({link.owner}, timeout=CLOSE_S)
    for owner in late:
        owner.cancel()
    await asyncio.gather(link.owner, return_exceptions=True)


def _is_lost(error: Any) -> bool:
    from mcp.types import CONNECTION_CLOSED

    return getattr(getattr(error, "error", error), "code", None) == CONNECTION_CLOSED


def reason(error: BaseException) -> str:
    """The first plain exception in a group of groups, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def list_tools(name: str, open_client: OpenClient, connect_s: float) -> list[Any]:
    """What the server offers, asked on a connection of its own. Blocks; may be called beside a running event loop.

    Raises:
        UserError: the server cannot be reached or answers nothing usable.
    """

    async def ask() -> list[Any]:
        async with asyncio.timeout(connect_s), open_client() as client:
            offered, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                offered += page.tools
                cursor = page.next_cursor
                if not cursor:
                    return offered

    answer: list[Any] = []

    def run() -> None:
        try:
            answer.append(asyncio.run(ask()))
        except BaseException as error:  # told to whoever waits for the thread
            answer.append(error)

    thread = threading.Thread(target=run, name=f"MCP server {name}", daemon=True)
    thread.start()
    thread.join(connect_s + CLOSE_S)
    if not answer or isinstance(answer[0], BaseException):
        why = reason(answer[0]) if answer else f"no answer within {connect_s:g} s"
        raise UserError(f"tool 'mcp': server {name!r} does not list its tools: {why}")
    return list(answer[0])
