"""Cases that broke other systems, on a real engine: slow tools beside weight updates, and a blocked event loop."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.requirements import need

need("vllm", "ray")

from transformers import AutoModelForCausalLM

from actors.engine import Engine, Generated
from actors.rollout_worker import RolloutWorker
from actors.weights import WeightReceiver
from tests.episodes import Script, call, play
from tests.integration import tiny_engines
from toolrl import presets
from toolrl.app.tiny_model import write_tiny_model
from toolrl.config import ToolConfig
from toolrl.tools import function_schema
from toolrl.trajectory import Outcome, ToolResult

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

MAY_RETURN = asyncio.Event()
CALLED = asyncio.Event()


class Slow:
    """A user's tool whose call returns when the test says so."""

    name = "slow"
    schema = function_schema("slow", "Takes ten minutes.", {"expression": "anything"})
    timeout_s = 600.0

    def __init__(self, config: ToolConfig, interpreter: Any) -> None: ...

    @asynccontextmanager
    async def session(self, episode_id: str) -> Any:
        yield self

    async def call(self, call: Any) -> ToolResult:
        CALLED.set()
        await MAY_RETURN.wait()
        return ToolResult(call.id, call.name, "ok", "done")


class OpensWithACall:
    """The engine, but for the first turn, which a model of random weights would not get right."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.script = engine, Script([call("1", "slow")], version=0)

    async def generate(self, prompt_ids: list[int], **how: Any) -> Generated:
        if not self.script.asked:
            return await self.script.generate(prompt_ids, **how)
        return await self.engine.generate(prompt_ids, **how)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_tiny_model(place / str(seed), seed)
    engine = await tiny_engines.engine(place / "0", "slow-tools")
    yield engine, place
    await engine.stop()


async def test_a_tool_call_of_ten_minutes_holds_no_weight_update_up(engine: tuple[Engine, Path]) -> None:
    served, place = engine
    new = AutoModelForCausalLM.from_pretrained(place / "1", dtype="float32")
    episode = asyncio.create_task(
        play(
            script=OpensWithACall(served), tool_names=(f"{__name__}:Slow",), max_turn_tokens=30, max_context_tokens=500
        )  # type: ignore[arg-type]
    )
    await asyncio.wait_for(CALLED.wait(), 60)
    begun = time.monotonic()
    report = await WeightReceiver(served).apply(tiny_engines.publication(new, 1))
    assert report["version"] == 1 and time.monotonic() - begun < 20
    assert not episode.done()  # its call still runs
    MAY_RETURN.set()
    trajectory = await asyncio.wait_for(episode, 60)
    first, _, last = trajectory.turns
    assert trajectory.outcome is not None and trajectory.outcome is not Outcome.INFRA_ERROR
    assert (set(first.weight_versions), set(last.weight_versions)) == ({0}, {1})
    # And the prefix that old weights had cached is not what the second turn was sampled from.
    expected = tiny_engines.logprobs(new, trajectory.token_ids[: -len(last.token_ids)], last.token_ids, 1.0)
    assert tiny_engines.gap(expected, last.logprobs) < tiny_engines.TOLERANCE


async def test_the_gauge_shows_a_blocked_event_loop() -> None:
    worker = RolloutWorker("w", presets.load("quickstart-cpu", []), "no model is needed", None)
    measuring = asyncio.create_task(worker._measure_loop_lag())
    await asyncio.sleep(0.5)
    idle = worker.loop_lag_s
    time.sleep(1.0)  # noqa: ASYNC251 what the gauge is for
    await asyncio.sleep(0.2)
    measuring.cancel()
    assert worker.loop_lag_s > idle + 0.5
