"""The toolbox: what the model wrote always gets a result, what the machinery did never looks like the model's fault."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from toolrl.config import ToolConfig
from toolrl.registry import UnknownName
from toolrl.tools import InfraError, Toolbox, function_schema
from toolrl.tools.toolbox import TRANSIENT_ERRORS
from toolrl.trajectory import ToolCall, ToolResult


class Counter:
    """A user's own tool: counts its calls within an episode, or does what it is asked to."""

    name = "counter"
    schema = function_schema("counter", "Counts.", {"what": "anything"})

    def __init__(self, config, interpreter):
        self.timeout_s = config.timeout_s
        self.opened, self.closed = [], []

    @asynccontextmanager
    async def session(self, episode_id):
        self.opened.append(episode_id)
        yield CounterSession()
        self.closed.append(episode_id)


class CounterSession:
    def __init__(self):
        self.count = 0

    async def call(self, call):
        match call.arguments["what"]:
            case "sleep":
                await asyncio.sleep(60)
            case "break":
                raise KeyError("a defect")
            case "time out":
                raise TimeoutError("a socket inside the tool")
            case "lose":
                return ToolResult(call.id, call.name, "infra_error", "the service is gone")
        self.count += 1
        return ToolResult(call.id, call.name, "ok", str(self.count))


HERE = f"{__name__}:Counter"


def call(name, number=0, **arguments):
    return ToolCall(f"call_{number}", name, arguments)


def box(**settings):
    return Toolbox.build([ToolConfig(HERE, **settings), ToolConfig("calculator")], interpreter=None, seed=0)


async def test_state_lives_as_long_as_the_episode_and_sessions_open_at_the_first_call():
    toolbox = box()
    tool = toolbox._tools["counter"]
    async with toolbox.session("one") as one, toolbox.session("two") as two:
        assert tool.opened == []
        assert [(await one.call(call("counter", what="count"))).text for _ in range(3)] == ["1", "2", "3"]
        assert (await two.call(call("counter", what="count"))).text == "1"
        assert (tool.opened, tool.closed) == (["one", "two"], [])
    assert sorted(tool.closed) == ["one", "two"]


async def test_calls_at_once_open_one_session():
    toolbox = box()
    async with toolbox.session("one") as one:
        results = await asyncio.gather(*(one.call(call("counter", number=i, what="count")) for i in range(5)))
    assert [result.call_id for result in results] == [f"call_{i}" for i in range(5)]
    assert toolbox._tools["counter"].opened == ["one"]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (call("countr", what="x"), "unknown tool 'countr'; did you mean 'counter'?"),
        (call("", what="x"), "unknown tool ''"),
        (call("counter"), "counter: 'what' is a required property"),
        (call("counter", what=5), "counter: argument 'what': 5 is not of type 'string'"),
        (call("counter", what="x", more=1), "('more' was unexpected)"),
        (call("calculator", expression={"a": "b" * 5000}), "is not of type 'string'"),
    ],
)
async def test_a_wrong_call_is_told_and_opens_nothing(asked, text):
    toolbox = box()
    async with toolbox.session("one") as tools:
        result = await tools.call(asked)
    assert result.status == "invalid_call"
    assert result.text.startswith("Error: ")
    assert text in result.text
    assert len(result.text) < 500
    assert toolbox._tools["counter"].opened == []


async def test_a_tool_that_takes_too_long_is_a_timeout_said_to_the_model():
    async with box(timeout_s=0.05).session("one") as tools:
        result = await tools.call(call("counter", what="sleep"))
        assert (result.status, result.text) == ("timeout", "Error: counter did not finish within 0.05 s")
        assert 0.05 <= result.wall_s < 5
        assert (await tools.call(call("counter", what="count"))).text == "1"


@pytest.mark.parametrize("what", ["break", "lose", "time out"])
async def test_a_defect_of_the_tool_is_never_the_models_mistake(what):
    async with box().session("one") as tools:
        with pytest.raises(InfraError, match="counter"):
            await tools.call(call("counter", what=what))


async def test_a_cancelled_call_stays_cancelled():
    async with box().session("one") as tools:
        waiting = asyncio.create_task(tools.call(call("counter", what="sleep")))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def failures(toolbox, episode_id, calls=40):
    async with toolbox.session(episode_id) as tools:
        results = [await tools.call(call("counter", number=i, what="count")) for i in range(calls)]
    return [(result.status, result.text) for result in results]


async def test_failures_on_purpose_depend_on_seed_episode_and_call_alone():
    shaky = box(failure_rate=0.3)
    drawn = await failures(shaky, "a")
    assert drawn == await failures(box(failure_rate=0.3), "a")
    assert [status for status, _ in drawn] != [status for status, _ in await failures(shaky, "b")]
    texts = {text for status, text in drawn if status == "error"}
    assert texts <= {text.format(name="counter") for text in TRANSIENT_ERRORS}
    many = [status for n in range(25) for status, _ in await failures(shaky, f"e{n}")]
    assert 0.25 < many.count("error") / len(many) < 0.35


async def test_failure_rate_one_always_fails_and_zero_never():
    assert {status for status, _ in await failures(box(failure_rate=1.0), "a")} == {"error"}
    assert {status for status, _ in await failures(box(), "a")} == {"ok"}


async def test_the_calculator_works_through_the_toolbox():
    toolbox = box()
    assert [schema["function"]["name"] for schema in toolbox.schemas] == ["counter", "calculator"]
    async with toolbox.session("one") as tools:
        right = await tools.call(call("calculator", expression="6 * 7"))
        wrong = await tools.call(call("calculator", expression="6 /"))
    assert (right.status, right.text) == ("ok", "42")
    assert (wrong.status, wrong.text.startswith("Error: ")) == ("error", True)


class BadSchema(Counter):
    schema = function_schema("counter", "Counts.", {}) | {"function": {"name": "counter", "parameters": {"type": "t"}}}


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([ToolConfig("pyhton")], "did you mean 'python'"),
        ([ToolConfig("python")], "needs an interpreter"),
        ([ToolConfig("calculator", options={"digits": 3})], "takes no options, got digits"),
        ([ToolConfig("calculator"), ToolConfig("calculator")], "two tools are called 'calculator'"),
        ([ToolConfig("calculator", failure_rate=20)], "failure_rate 20 is not between 0 and 1"),
        ([ToolConfig(f"{__name__}:BadSchema")], "no JSON schema"),
        ([ToolConfig("no.such.module:Tool")], "cannot be imported"),
    ],
)
def test_a_tool_that_cannot_work_is_refused_at_once(configs, message):
    with pytest.raises((ValueError, UnknownName), match=message):
        Toolbox.build(configs, interpreter=None, seed=0)


async def test_recorded_calls_run_again_for_their_state_and_failures_on_purpose_are_not_drawn_again():
    calls = [call("counter", number=i, what="count") for i in range(12)] + [call("calculator", 12, expression="1 + 1")]
    async with box(failure_rate=0.5).session("one") as first:
        recorded = [await first.call(each) for each in calls]
        following = await first.call(call("counter", what="count"))
    failed = [result.injected for result in recorded]
    assert 2 < sum(failed) < 10 and not failed[-1]
    assert [result.status == "error" for result in recorded] == failed

    toolbox = box(failure_rate=0.5)
    for episode in ("one", "a branch, which draws for itself"):
        async with toolbox.session(episode) as again:
            replayed = [await again.replay(each, was) for each, was in zip(calls, recorded, strict=True)]
            assert [result is None for result in replayed] == [*failed[:-1], True]  # the calculator keeps no state
            assert [r.text for r in replayed if r] == [
                r.text for r, no in zip(recorded[:-1], failed[:-1], strict=True) if not no
            ]
            assert again._calls == len(calls)
            if episode == "one":  # what it draws from here on is what it would have drawn
                after = await again.call(call("counter", what="count"))
                assert (after.status, after.text, after.injected) == (
                    following.status, following.text, following.injected
                )  # fmt: skip


async def test_a_call_that_reached_no_tool_reaches_none_when_it_is_replayed():
    toolbox = box()
    unknown = call("missing", what="count")
    async with toolbox.session("one") as one:
        assert await one.replay(unknown, ToolResult("call_0", "missing", "invalid_call", "Error")) is None
        assert (
            await one.replay(unknown, ToolResult("call_0", "missing", "ok", "a tool that is configured no more"))
            is None
        )
    assert toolbox._tools["counter"].opened == []
