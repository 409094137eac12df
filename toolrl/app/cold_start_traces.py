"""Cold-start traces: trajectories of a scripted policy whose programs really run, exact to the token.

Invariants:
- Every result is what the tool said: no output is made up. Calls that are to fail go through a toolbox that fails every
  call.
- Turn boundaries and ids are those of a rollout: policy turns as a perfect sampler would have sampled them (their end
  token included), tool turns as `ChatFormat.observation_ids` gives them. The run's own parser reads each call back; a
  trace whose calls do not come back as planned is a defect and raises.
- The same settings and seed give the same tokens, whatever order the programs ran in.
- Policy turns carry log-probability 0 and weight version 0: nothing sampled them; supervised training reads neither.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from toolrl.answers import answer_of
from toolrl.app.cold_start_dense import dense_traces
from toolrl.app.cold_start_plan import Plan, plan
from toolrl.config import RunConfig
from toolrl.conversation import ChatFormat
from toolrl.tasks import Task, TaskSource
from toolrl.toolcalls import Parser
from toolrl.tools import Interpreter, Toolbox, ToolboxSession
from toolrl.trajectory import Outcome, ToolCall, ToolResult, Trajectory, Turn

# Tasks of traces are counted from here, far from the indices that reinforcement learning will draw.
FIRST_TASK = 1_000_000_000
PYTHON = "python"


class TraceMaker:
    """Writes traces. Holds what all of them share: the chat format, the parser, the tools."""

    def __init__(self, config: RunConfig, tokenizer: Any, chat: ChatFormat, parser: Parser, source: TaskSource) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.chat = chat
        self.parser = parser
        self.source = source

    async def make(self, interpreter: Interpreter, first_task: int = FIRST_TASK) -> list[Trajectory]:
        """[cold_start.traces] traces, in the order of their index, of the source's tasks from `first_task` on. Dense ones
        (`cold_start.dense`) pass over the tasks that give none.

        Raises:
            NoSolver: a task that no solver knows; found before any program runs.
            UserError: too few dense traces are left of those that were made; says why.
            InfraError: the tool's own machinery died.
        """
        settings = self.config.cold_start
        if settings.dense:
            return await dense_traces(self.config, self.source, functools.partial(self._waves, interpreter), first_task)
        tasks = [self.source.task(first_task + index) for index in range(settings.traces)]
        plans = [plan(task, settings, self.config.seed, index) for index, task in enumerate(tasks)]
        return await self._waves(interpreter, tasks, plans, 0)

    async def _waves(
        self, interpreter: Interpreter, tasks: Sequence[Task], plans: Sequence[Plan], first_index: int
    ) -> list[Trajectory]:
        """Plays the plans on as many sessions as the pool keeps warm; traces are counted from `first_index` on."""
        lanes = max(1, min(self.config.sandbox.min_sessions, len(tasks)))
        numbers = range(first_index, first_index + len(tasks))
        async with asyncio.TaskGroup() as group:
            work = [
                group.create_task(
                    self._lane(lane, interpreter, tasks[lane::lanes], plans[lane::lanes], numbers[lane::lanes])
                )
                for lane in range(lanes)
            ]
        made = [trace for lane in work for trace in lane.result()]
        return sorted(made, key=lambda trace: trace.sample_index)

    async def _lane(
        self,
        lane: int,
        interpreter: Interpreter,
        tasks: Sequence[Task],
        plans: Sequence[Plan],
        numbers: Sequence[int],
    ) -> list[Trajectory]:
        """One interpreter session plays its traces one after the other; see the solvers' third invariant."""
        working, failing = (
            Toolbox.build(
                # A trace is written with its results at hand, whatever the run's policy has to wait for.
                [
                    dataclasses.replace(tool, failure_rate=rate, mode="await", deadline_s=None)
                    for tool in self.config.tools
                ],
                interpreter=interpreter,
                seed=self.config.seed,
            )
            for rate in (0.0, 1.0)
        )
        made = []
        async with working.session(f"cold-start-{lane}") as tools, failing.session(f"cold-start-{lane}") as broken:
            for number, task, drawn in zip(numbers, tasks, plans, strict=True):
                made.append(await self._play(number, task, drawn, tools, broken))
        return made

    async def _play(
        self, index: int, task: Task, drawn: Plan, tools: ToolboxSession, broken: ToolboxSession
    ) -> Trajectory:
        trace = Trajectory(
            id=f"cold-start-{index}",
            group_id=f"cold-start-{index}",
            task_id=task.id,
            sample_index=index,
            prompt_ids=self.chat.prompt_ids(task.messages),
            metadata={"family": task.family, "kind": drawn.kind},
        )
        answer = drawn.guess
        if drawn.kind == "malformed":
            meant = self._written(self._planned(drawn.programs[0], trace))
            await self._say(trace, malformed(self.parser, meant, drawn.malformation), tools)
        if drawn.first_call_fails:
            await self._call(trace, drawn.programs[0], broken)
        if not drawn.gives_up:
            for program in drawn.programs:
                result = await self._call(trace, program, tools)
                answer = result.text.strip() if result.status == "ok" else drawn.guess
        await self._say(trace, final(answer, self.config.tasks.answer), None)
        trace.answer = answer_of(trace, self.config.tasks.answer)
        trace.outcome = Outcome.NO_ANSWER if trace.answer is None else Outcome.ANSWERED
        trace.check()
        return trace

    async def _call(self, trace: Trajectory, program: str, tools: ToolboxSession) -> ToolResult:
        planned = self._planned(program, trace)
        token_ids = self.chat.assistant_ids("", [planned])
        results = await self._append(trace, token_ids, tools)
        if trace.policy_turns[-1].calls != [planned]:
            read = trace.policy_turns[-1]
            raise RuntimeError(f"parser {self.parser.name!r} reads {read.text!r} as {read.calls}, not as {planned}")
        return results[0]

    def _planned(self, program: str, trace: Trajectory) -> ToolCall:
        """The next call of `trace`, as the parser will number it, under the names that the policy knows."""
        names = next((tool.rename for tool in self.config.tools if tool.name == PYTHON), {})
        arguments = {names.get(f"{PYTHON}.code", "code"): program}
        return ToolCall(f"call_{_calls_so_far(trace)}", names.get(PYTHON, PYTHON), arguments)

    def _written(self, planned: ToolCall) -> str:
        """The call as the chat template writes it, without the end token: vLLM's parsers only read."""
        ids = self.chat.assistant_ids("", [planned])
        text: str = self.tokenizer.decode(ids[:-1], skip_special_tokens=False)
        return text

    async def _say(self, trace: Trajectory, content: str, tools: ToolboxSession | None) -> None:
        await self._append(trace, self.chat.assistant_ids(content), tools)

    async def _append(self, trace: Trajectory, token_ids: list[int], tools: ToolboxSession | None) -> list[ToolResult]:
        """Appends a policy turn, and the tool turn that answers it unless it is the last one (`tools` is None)."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        parsed = self.parser.parse(text, _calls_so_far(trace))
        turn = Turn(
            kind="policy",
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            weight_versions=[0] * len(token_ids),
            finish_reason="stop",
            text=text,
            calls=parsed.calls,
            call_errors=parsed.errors,
        )
        trace.turns.append(turn)
        if tools is None:
            return []
        results = [await tools.call(each) for each in turn.calls]
        results += [
            ToolResult(call_id=f"error_{n}", name="", status="invalid_call", text=f"Error: {error.message}")
            for n, error in enumerate(turn.call_errors)
        ]
        limits = self.config.rollout
        shown = self.chat.observation_ids(turn, results, limits.max_observation_tokens, cut=limits.truncate_observation)
        trace.turns.append(Turn(kind="tool", token_ids=shown, results=results))
        return results


def _calls_so_far(trace: Trajectory) -> int:
    return sum(len(turn.calls) + len(turn.call_errors) for turn in trace.policy_turns)


def malformed(parser: Parser, good: str, way: int) -> str:
    """The call `good`, spoilt so that `parser` does not read it: its end is missing, or a character before it."""
    closing = next((tag for tag in sorted(parser.tags, key=len, reverse=True) if good.endswith(tag)), "")
    body = good.removesuffix(closing)
    ways = [body.rstrip(), body.rstrip()[:-1] + body[len(body.rstrip()) :] + closing]
    broken = [text for text in ways if parser.parse(text).errors and not parser.parse(text).calls]
    if not broken:
        raise RuntimeError(f"parser {parser.name!r} takes every broken form of {good!r} for a call or an answer")
    return broken[way % len(broken)]


def final(answer: str, how: str) -> str:
    """The words that give `answer` in the form that `tasks.answer` reads."""
    return {"boxed": f"\\boxed{{{answer}}}", "tag": f"<answer>{answer}</answer>", "last_line": answer}[how]
