"""A small MCP server on the official SDK, over stdio or streamable HTTP: `python mcp_server.py [PORT]`."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server import MCPServer

server = MCPServer("shelf")
KEPT: list[str] = []


@server.tool()
def weigh(item: str, grams: int = 1) -> str:
    """Weigh an item.

    Args:
        item: what to weigh
        grams: how heavy it is
    """
    return f"{item}: {grams} g"


@server.tool()
def keep(item: str) -> int:
    """Keep an item; returns how many there are."""
    KEPT.append(item)
    return len(KEPT)


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ValueError(reason)


@server.tool()
def die() -> str:
    """End the server's process."""
    os._exit(3)


@server.tool()
def pid() -> int:
    """The server's process."""
    return os.getpid()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
