"""What a critic may write of one small task, and the run's parts that play it: no sandbox, the calculator is at hand."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

from actors.worker_setup import Setup
from tests.episodes import LINES, TASK, call, play, tiny
from toolrl import toolcalls
from toolrl.app.correcting import tools_of_corrections
from toolrl.app.tiny_tokenizer import END
from toolrl.config import RunConfig, ToolConfig
from toolrl.config_supervision import ReflectionConfig
from toolrl.conversation import ChatFormat
from toolrl.supervision.reflection import Question
from toolrl.tasks import Task
from toolrl.tools import Toolbox
from toolrl.trajectory import Trajectory

LOST = f"I do not know.{END}"


class Tasks:
    def task(self, index: int) -> Task:
        return TASK


@functools.cache
def chat() -> ChatFormat:
    schemas = Toolbox.build([ToolConfig("calculator"), ToolConfig(LINES)], None, 0).schemas
    return ChatFormat(tiny(), tools=schemas, parser=toolcalls.get("hermes"))


def config_of(**reflection: Any) -> RunConfig:
    config = RunConfig(seed=5, tools=[ToolConfig("calculator", failure_rate=0.9), ToolConfig(LINES, mode="deferred")])
    config.rollout = replace(config.rollout, max_turn_tokens=200, max_response_tokens=600, max_context_tokens=2000)
    config.supervision.reflection = ReflectionConfig(**{"critic": f"{__name__}:right", **reflection})
    return config


def setup_of(config: RunConfig) -> Setup:
    toolbox = Toolbox.build(tools_of_corrections(config).tools, None, 0)
    return Setup(tiny(), None, toolbox, toolcalls.get("hermes"), chat(), Tasks())  # type: ignore[arg-type]


def seated(made: Trajectory, group: int = 0) -> Trajectory:
    return replace(made, id=f"g{group:06d}.3", group_id=f"g{group:06d}", rewards={"outcome": 0.0})


def turn(text: str, *calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {"text": text, "calls": [{"name": name, "arguments": arguments} for name, arguments in calls]}


def times(expression: str = "17 * 24") -> tuple[str, dict[str, Any]]:
    return "calculator", {"expression": expression}


FINAL = turn("So it is \\boxed{408}.")
GOOD = {"turns": [turn("Multiply.", times()), FINAL]}


def right(question: Question, settings: ReflectionConfig) -> str:
    return json.dumps(GOOD)


async def lost() -> Trajectory:
    """It calls with a wrong expression, and gives no answer."""
    return seated(await play(f"Hm.{call('17 + 24')}", LOST, chat=chat()))
