"""The tools of a real MCP server, in a process of its own, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.requirements import need

need("mcp")

from tests.episodes import ANSWER, Script, play
from toolrl.app.tiny_tokenizer import END
from toolrl.config import ToolConfig
from toolrl.errors import UserError
from toolrl.tools import InfraError, Toolbox, ToolboxSession
from toolrl.tools.mcp_connection import TRIES
from toolrl.trajectory import Outcome, ToolCall, ToolResult

pytestmark = pytest.mark.timeout(120)

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = {"command": [sys.executable, SERVER], "connect_s": 40}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(port: int) -> subprocess.Popen[bytes]:
    server = subprocess.Popen([sys.executable, SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 40
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return server
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server did not start")


@pytest.fixture
def http() -> Iterator[tuple[int, list[subprocess.Popen[bytes]]]]:
    port = free_port()
    servers = [start(port)]
    yield port, servers
    for server in servers:
        server.kill()
        server.wait()


def url(port: int) -> dict[str, Any]:
    return {"url": f"http://127.0.0.1:{port}/mcp", "connect_s": 40}


@asynccontextmanager
async def tools_of(options: dict[str, Any], **settings: Any) -> AsyncIterator[tuple[Toolbox, ToolboxSession]]:
    config = ToolConfig("mcp", options=options, **{"timeout_s": 20.0, **settings})
    toolbox = await asyncio.to_thread(Toolbox.build, [config], None, 0)
    try:
        async with toolbox.session("e") as session:
            yield toolbox, session
    finally:
        await toolbox.close()


async def ask(session: ToolboxSession, name: str, **arguments: Any) -> ToolResult:
    return await session.call(ToolCall("call_0", name, arguments))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


async def test_a_servers_tools_are_ours_with_their_schemas_and_results():
    async with tools_of({**STDIO, "prefix": "shelf_"}, timeout_s=5.0) as (toolbox, session):
        by_name = {schema["function"]["name"]: schema["function"] for schema in toolbox.schemas}
        assert set(by_name) == {f"shelf_{name}" for name in ("weigh", "keep", "wait", "fail", "die", "pid")}
        weigh = by_name["shelf_weigh"]
        assert weigh["description"].startswith("Weigh an item.\n\nArgs:\n    item: what")
        assert set(weigh["parameters"]["properties"]) == {"item", "grams"} and weigh["parameters"]["required"] == [
            "item"
        ]

        result = await ask(session, "shelf_weigh", item="apple", grams=150)
        assert (result.status, result.text) == ("ok", "apple: 150 g")
        assert (await ask(session, "shelf_weigh", grams=1)).status == "invalid_call"  # by the schema, before it is sent
        failed = await ask(session, "shelf_fail", reason="no")
        assert failed.status == "error" and "fail" in failed.text
        pid = (await ask(session, "shelf_pid")).text

        began = time.monotonic()
        results = await asyncio.gather(*(ask(session, "shelf_wait", seconds=1.0) for _ in range(8)))
        assert [result.text for result in results] == ["waited"] * 8 and time.monotonic() - began < 5  # side by side
        late = await ask(session, "shelf_wait", seconds=30)
        assert (late.status, late.text) == ("timeout", "Error: shelf_wait did not finish within 5 s")
        assert (await ask(session, "shelf_pid")).text == pid  # the same server, still connected
        assert alive(int(pid))
    assert not alive(int(pid))  # closed with the toolbox


async def test_a_server_that_dies_fails_the_calls_under_way_and_is_started_again():
    async with tools_of(STDIO) as (toolbox, session):
        pid = int((await ask(session, "pid")).text)
        waiting = asyncio.create_task(ask(session, "wait", seconds=30))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        with pytest.raises(InfraError, match="MCP server"):
            await ask(session, "die")
        with pytest.raises(InfraError, match="MCP server"):
            await waiting
        assert time.monotonic() - began < 10
        assert int((await ask(session, "pid")).text) != pid
        connection = toolbox._tools["pid"].connection  # type: ignore[attr-defined]
        assert connection.connections == 2


async def test_over_http_too_and_a_server_that_comes_back_is_found_again(http: Any):
    port, servers = http
    async with tools_of(url(port)) as (_, session):
        assert (await ask(session, "weigh", item="pear")).text == "pear: 1 g"
        assert (await ask(session, "keep", item="pear")).text == "1"
        waiting = asyncio.create_task(ask(session, "wait", seconds=30))
        await asyncio.sleep(0.3)
        servers[0].send_signal(signal.SIGKILL)
        servers[0].wait()
        with pytest.raises(InfraError, match="MCP server"):
            await waiting
        began = time.monotonic()
        with pytest.raises(InfraError, match=f"tried {TRIES} times"):  # bounded, and within seconds
            await ask(session, "weigh", item="pear")
        assert time.monotonic() - began < 20
        servers.append(await asyncio.to_thread(start, port))
        assert (await ask(session, "weigh", item="pear")).text == "pear: 1 g"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "either command"),
        ({"command": ["x"], "url": "http://x"}, "either command"),
        ({"command": "uvx server"}, "list of words"),
        ({"comand": ["x"]}, "did you mean 'command'"),
        ({"command": ["/nonexistent/server"], "connect_s": 5}, "does not list its tools"),
        ({**STDIO, "tools": ["wiegh"]}, "no tool 'wiegh'; did you mean 'weigh'"),
    ],
)
async def test_a_server_that_cannot_work_is_refused_before_the_run(options: dict[str, Any], told: str):
    with pytest.raises(UserError, match=told):
        Toolbox.build([ToolConfig("mcp", options=options)], None, 0)  # beside a running event loop


async def test_an_episode_whose_server_dies_is_an_infra_error():
    die = f'<tool_call>\n{{"name": "die", "arguments": {{}}}}\n</tool_call>{END}'
    config = ToolConfig("mcp", timeout_s=20.0, options={**STDIO, "tools": ["die"]})
    dead = await play(script=Script([die, ANSWER]), tool_names=(config,), components=("outcome",))
    assert (dead.outcome, dead.rewards) == (Outcome.INFRA_ERROR, {}) and "MCP server" in dead.metadata["infra_error"]
