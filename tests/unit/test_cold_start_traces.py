"""Cold-start traces: exact tokens, results that were really computed, shares of mistakes; batches of the training."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from toolrl import tasks, toolcalls, trajectory_parquet
from toolrl.app.cold_start import batches, read_traces
from toolrl.app.cold_start_traces import TraceMaker, malformed
from toolrl.app.tiny_tokenizer import build_tokenizer
from toolrl.config import ColdStartConfig, FamilyConfig, RolloutConfig, RunConfig, TaskConfig, ToolConfig
from toolrl.conversation import ChatFormat
from toolrl.errors import UserError
from toolrl.tools import Toolbox
from toolrl.trajectory import Outcome, ToolCall, Trajectory

TOKENIZER = build_tokenizer()
CONFIG = RunConfig(
    seed=3,
    tasks=TaskConfig(
        families=[FamilyConfig("chain_sum"), FamilyConfig("gcd"), FamilyConfig("products")],
        system_prompt="Use python.",
        held_out_tasks=6,
    ),
    tools=[ToolConfig("python", failure_rate=0.2)],
    rollout=RolloutConfig(max_observation_tokens=64),
    cold_start=ColdStartConfig(
        traces=240,
        min_calls=1,
        max_calls=2,
        direct_guess_share=0.25,
        malformed_call_share=0.25,
        wrong_code_share=0.25,
        retry_share=0.4,
    ),
)


@dataclass
class Run:
    """What a cell came to."""

    stdout: str
    stderr: str = ""
    status: str = "ok"
    value: str | None = None
    truncated: bool = False
    exit_code: int | None = None
    wall_s: float = 0.0
    queue_s: float = 0.0
    cpu_s: float = 0.0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    state_lost: bool = False


class HereInterpreter:
    """Runs cells in this process: the interpreter protocol without a sandbox, for programs of our own."""

    def __init__(self) -> None:
        self.cells: list[str] = []

    async def acquire(self, *, episode_id: str) -> HereSession:
        return HereSession(self)


class HereSession:
    def __init__(self, interpreter: HereInterpreter) -> None:
        self.interpreter = interpreter
        self.names: dict[str, object] = {}

    async def run(self, code: str, *, timeout_s: float) -> Run:
        self.interpreter.cells.append(code)
        await asyncio.sleep(0)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                exec(code, self.names)
            except Exception as error:
                return Run(out.getvalue(), stderr=f"{type(error).__name__}: {error}", status="error")
        return Run(out.getvalue())

    async def release(self) -> None:
        self.names.clear()


def maker(config: RunConfig, interpreter: HereInterpreter) -> TraceMaker:
    parser = toolcalls.get(config.rollout.parser)
    schemas = Toolbox.build(config.tools, interpreter=interpreter, seed=0).schemas
    chat = ChatFormat(TOKENIZER, tools=schemas, parser=parser)
    return TraceMaker(config, TOKENIZER, chat, parser, tasks.build(config.tasks, config.seed))


@pytest.fixture(scope="module")
def made() -> tuple[list[Trajectory], HereInterpreter]:
    interpreter = HereInterpreter()
    return asyncio.run(maker(CONFIG, interpreter).make(interpreter)), interpreter


def test_traces_show_results_where_the_run_shows_receipts(made: tuple[list[Trajectory], HereInterpreter]) -> None:
    tools = [replace(tool, mode="deferred", deadline_s=1e-6) for tool in CONFIG.tools]
    config = replace(CONFIG, tools=tools, cold_start=replace(CONFIG.cold_start, traces=6))
    traces = asyncio.run(maker(config, interpreter := HereInterpreter()).make(interpreter))
    assert [trace.token_ids for trace in traces] == [trace.token_ids for trace in made[0][:6]]


def test_traces_call_a_tool_by_the_name_that_the_run_gives_it(made: tuple[list[Trajectory], HereInterpreter]) -> None:
    tools = [replace(tool, rename={"python": "run", "python.code": "source"}) for tool in CONFIG.tools]
    config = replace(CONFIG, tools=tools, cold_start=replace(CONFIG.cold_start, traces=12))
    traces = asyncio.run(maker(config, interpreter := HereInterpreter()).make(interpreter))
    calls = [call for trace in traces for turn in trace.policy_turns for call in turn.calls]
    assert calls and all((call.name, list(call.arguments)) == ("run", ["source"]) for call in calls)
    assert [trace.answer for trace in traces] == [trace.answer for trace in made[0][:12]]


def test_traces_are_whole_renders_of_the_chat_template(made: tuple[list[Trajectory], HereInterpreter]) -> None:
    schemas = Toolbox.build(CONFIG.tools, interpreter=made[1], seed=0).schemas
    source = tasks.build(CONFIG.tasks, CONFIG.seed)
    by_id = {}
    for index in range(CONFIG.cold_start.traces):
        task = source.task(1_000_000_000 + index)
        by_id[task.id] = task
    for trace in made[0]:
        messages = list(by_id[trace.task_id].messages)
        for turn in trace.turns:
            if turn.kind == "tool":
                messages += [{"role": "tool", "content": result.text} for result in turn.results]
            else:
                messages.append({"role": "assistant", "content": turn.text.removesuffix("<|im_end|>")})
        render = TOKENIZER.apply_chat_template(messages, tools=schemas, tokenize=False)
        # The template ends the last message with a newline that nobody samples.
        assert TOKENIZER.decode(trace.token_ids) + "\n" == render
        assert TOKENIZER(render.removesuffix("\n"), add_special_tokens=False)["input_ids"] == trace.token_ids


def test_every_policy_turn_ends_with_the_end_token_and_says_what_it_calls(
    made: tuple[list[Trajectory], HereInterpreter],
) -> None:
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    parser = toolcalls.get("hermes")
    for trace in made[0]:
        trace.check()
        for turn in trace.policy_turns:
            assert turn.token_ids[-1] == end
            assert turn.token_ids.count(end) == 1
        last = trace.policy_turns[-1]
        assert (last.calls, last.call_errors) == ([], [])
        assert parser.format_state(last.text, "stop") == "healthy_answer"
        assert trace.outcome is Outcome.ANSWERED


def test_results_are_what_the_programs_printed(made: tuple[list[Trajectory], HereInterpreter]) -> None:
    traces, interpreter = made
    shown = Counter()
    for trace in traces:
        names: dict[str, object] = {}
        for turn, tool in zip(trace.turns[::2], trace.turns[1::2], strict=False):
            for call, result in zip(turn.calls, tool.results, strict=False):
                if result.status == "ok":
                    shown[call.arguments["code"]] += 1
                    with contextlib.redirect_stdout(io.StringIO()) as out:
                        exec(call.arguments["code"], names)
                    assert result.text == out.getvalue().strip()
    assert shown == Counter(interpreter.cells)  # nothing shown that did not run, nothing run that is not shown


def test_answers_are_the_last_result_or_a_guess(made: tuple[list[Trajectory], HereInterpreter]) -> None:
    kinds = Counter(trace.metadata["kind"] for trace in made[0])
    assert set(kinds) == {"direct", "malformed", "wrong_code", "solved"}
    gave_up = 0
    for trace in made[0]:
        results = [result for turn in trace.turns for result in turn.results]
        computed = [result.text for result in results if result.status == "ok"]
        if computed:
            assert trace.answer == computed[-1]
        else:
            gave_up += trace.metadata["kind"] != "direct"
            assert trace.answer is not None
            assert trace.answer in TOKENIZER.decode(trace.prompt_ids)
        if trace.metadata["kind"] == "malformed":
            assert trace.policy_turns[0].call_errors
            assert results[0].status == "invalid_call"
    assert gave_up > 0


def test_a_failed_call_is_repeated_word_for_word(made: tuple[list[Trajectory], HereInterpreter]) -> None:
    repeated = 0
    for trace in made[0]:
        results = [result for turn in trace.turns for result in turn.results]
        if len(results) > 1 and results[0].status == "error":
            first, second = trace.policy_turns[:2]
            assert first.token_ids == second.token_ids or second.calls[0].arguments != first.calls[0].arguments
            repeated += first.token_ids == second.token_ids
    assert repeated > 20


def test_the_same_seed_gives_the_same_tokens(made: tuple[list[Trajectory], HereInterpreter]) -> None:
    interpreter = HereInterpreter()
    again = asyncio.run(maker(CONFIG, interpreter).make(interpreter))
    assert [t.token_ids for t in again] == [t.token_ids for t in made[0]]
    assert len({t.id for t in again}) == CONFIG.cold_start.traces


@pytest.mark.parametrize("name", ["hermes", "tagged", "fenced"])
def test_malformed_calls_are_attempts_that_the_parser_refuses(name: str) -> None:
    parser = toolcalls.get(name)
    call = ToolCall("call_0", "python", {"code": "print(12 + 34)"})
    for way in range(4):
        parsed = parser.parse(malformed(parser, parser.render([call]), way))
        assert parsed.errors
        assert not parsed.calls


def test_traces_survive_their_file(made: tuple[list[Trajectory], HereInterpreter], tmp_path: Path) -> None:
    trajectory_parquet.write(tmp_path / "traces.parquet", made[0])
    assert read_traces(tmp_path / "traces.parquet") == made[0]


def test_a_file_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        read_traces(tmp_path / "none.parquet")
    trajectory_parquet.write(tmp_path / "empty.parquet", [])
    with pytest.raises(UserError, match="no finished trajectory"):
        read_traces(tmp_path / "empty.parquet")


def test_every_trace_is_seen_once_an_epoch() -> None:
    seen = [index for batch in batches(10, 4, 5, seed=1) for index in batch]
    assert sorted(seen[:10]) == list(range(10))
    assert sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert list(batches(10, 4, 5, seed=1)) == list(batches(10, 4, 5, seed=1))
    assert [len(batch) for batch in batches(3, 8, 2, seed=1)] == [8, 8]
