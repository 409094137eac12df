"""Parked episodes and the boxes of the interpreter: a box is kept only for a cell that runs in it; however few there are,
every episode comes to its end with the variables that it had."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from actors.parking import Slots
from sandbox import SandboxConfig, SandboxPool
from tests.episodes import ANSWER, Script, play
from toolrl.app.tiny_tokenizer import END
from toolrl.config import ToolConfig
from toolrl.tools import function_schema
from toolrl.trajectory import Outcome, ToolCall, ToolResult, Trajectory

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

NAP_S = 0.3
PARK_AFTER_S = 0.05


class Nap:
    """A remote service that takes its time."""

    name = "nap"
    keeps_no_state = True
    schema = function_schema("nap", "Sleeps.", {})

    def __init__(self, config: ToolConfig, interpreter: Any) -> None:
        self.timeout_s = config.timeout_s

    @asynccontextmanager
    async def session(self, episode_id: str) -> Any:
        yield self

    async def call(self, call: ToolCall) -> ToolResult:
        await asyncio.sleep(NAP_S)
        return ToolResult(call.id, call.name, "ok", "rested")


TOOLS = (ToolConfig("python", timeout_s=10.0), ToolConfig(f"{__name__}:Nap", timeout_s=10.0))


def python(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>{END}"


NAP = f'<tool_call>\n{{"name": "nap", "arguments": {{}}}}\n</tool_call>{END}'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_box() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig(backend="process", min_sessions=1, max_sessions=1)) as pool:
        yield pool


async def episode(pool: SandboxPool, slots: Slots, *turns: str, **settings: Any) -> Trajectory:
    async with slots.slot() as slot:
        return await play(
            script=Script([*turns, ANSWER]),
            tool_names=TOOLS,
            components=("outcome",),
            interpreter=pool,
            slot=slot,
            **settings,
        )


def texts(trajectory: Trajectory) -> list[str]:
    return [result.text for turn in trajectory.turns for result in turn.results]


async def test_one_box_serves_all_episodes_that_wait_for_another_tool(one_box: SandboxPool):
    slots = Slots(2, PARK_AFTER_S)
    played = await asyncio.gather(
        *(
            episode(one_box, slots, python(f"x = {n}"), NAP, python("x = x + 1"), NAP, python("print(x)"))
            for n in range(5)
        )
    )
    for n, each in enumerate(played):
        assert each.outcome is Outcome.ANSWERED, each.metadata
        assert texts(each) == ["(no output)", "rested", "(no output)", "rested", str(n + 1)]
        assert each.timings["parked_s"] > NAP_S and "replay_changed" not in each.metadata
    stats = one_box.stats()
    assert (stats.in_use, stats.waiting) == (0, 0)
    assert (slots.held, slots.parked, slots.waiting) == (0, 0, 0)


async def test_a_box_in_which_a_long_cell_runs_is_kept(one_box: SandboxPool):
    slots = Slots(1, PARK_AFTER_S)
    before = one_box.stats().acquired
    cell = "import time\nt = time.time_ns()\ntime.sleep(0.4)\nprint(t)"  # another number when it is run again
    twice = python(cell).removesuffix(END) + "\n" + python("print(t)")
    played = await episode(one_box, slots, twice, python("print(t)"))
    first, *others = texts(played)
    assert others == [first] * 2 and played.timings["parked_s"] > 0.2 and "replay_changed" not in played.metadata
    assert one_box.stats().acquired == before + 1


async def test_who_has_the_place_and_who_has_the_box_do_not_wait_for_each_other(one_box: SandboxPool):
    """The first keeps the box while it is parked and wants the place; the second has the place and wants the box."""
    slots = Slots(1, PARK_AFTER_S)
    slow, quick = python("import time\ntime.sleep(0.4)\nprint(1)"), python("print(2)")
    async with asyncio.timeout(20):
        first, second = await asyncio.gather(episode(one_box, slots, slow, quick), episode(one_box, slots, quick, slow))
    assert (texts(first), texts(second)) == (["1", "2"], ["2", "1"])


CLOCK = python("import time\nprint(time.time_ns())")


@pytest.mark.parametrize("how", ["restart", "refuse", "accept"])
async def test_a_state_that_cannot_be_brought_back_is_handled_as_configured(one_box: SandboxPool, how: str):
    slots = Slots(1, PARK_AFTER_S)

    class Again(Script):
        """Says the same from the beginning when the episode is started over."""

        async def generate(self, prompt_ids: list[int], *, request_id: str, **how: Any) -> Any:
            said = [CLOCK, NAP, python("print(7)"), ANSWER][int(request_id.rpartition("-")[2])]
            self.asked.append({"request_id": request_id})
            return await Script([said]).generate(prompt_ids, request_id=request_id, **how)

    async with slots.slot() as slot:
        script = Again([])
        played = await play(
            script=script, tool_names=TOOLS, components=("outcome",), interpreter=one_box, slot=slot,
            on_changed_replay=how,
        )  # fmt: skip
    (change,) = played.metadata["replay_changed"]
    assert change["call_id"] == "call_0" and change["turn"] == 1 and change["recorded"] != change["replayed"]
    assert (len(script.asked), played.outcome) == {
        "restart": (7, Outcome.ANSWERED),  # once: the second time the box is kept
        "refuse": (3, Outcome.CANCELLED),
        "accept": (4, Outcome.ANSWERED),
    }[how]
    if played.outcome is Outcome.ANSWERED:
        assert texts(played)[1:] == ["rested", "7"]
    assert (slots.held, slots.parked, one_box.stats().in_use) == (0, 0, 0)
