"""One episode: generation interleaved with tool calls, recorded token by token.

Invariants:
- What the engine sampled is appended as it came; what it did not sample enters only as `ChatFormat.observation_ids`.
- Every limit has its own outcome, and the limit that bound is recorded by name.
- A fault of the machinery (engine, sandbox) ends this episode as `infra_error`, and no other episode; a fault of the
  model is an observation.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from actors.engine import EngineDied, EngineError, Generated
from toolrl.answers import How, answer_of
from toolrl.config import RolloutConfig
from toolrl.conversation import ChatFormat, ObservationTooLong
from toolrl.rewards import RewardPipeline
from toolrl.tasks import Task
from toolrl.toolcalls import Parsed, Parser
from toolrl.tools import InfraError, Toolbox, ToolboxSession
from toolrl.trajectory import LimitName, Outcome, ToolResult, Trajectory, Turn

log = logging.getLogger(__name__)


class GeneratesTokens(Protocol):
    """The part of `actors.engine.Engine` that an episode needs."""

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        stop_token_ids: list[int],
        seed: int | None,
        request_id: str,
    ) -> Generated: ...


@dataclass(frozen=True)
class Seat:
    """Which sample of which group an episode fills."""

    group_id: str
    sample_index: int
    seed: int  # of this sample's randomness, the same on every machine, in every schedule and on every try

    @property
    def trajectory_id(self) -> str:
        return f"{self.group_id}.{self.sample_index}"

    def turn_seed(self, turn: int) -> int:
        """The sampling seed of one turn, 31 bits."""
        digest = hashlib.blake2b(f"{self.seed}/{turn}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") >> 1


class EpisodeRunner:
    """Runs episodes on one engine. Shared by all episodes of a worker; holds nothing of a single one."""

    def __init__(
        self,
        engine: GeneratesTokens,
        chat: ChatFormat,
        parser: Parser,
        toolbox: Toolbox,
        rewards: RewardPipeline,
        config: RolloutConfig,
        *,
        tokenizer: Any,
        answer: How,
    ) -> None:
        self.engine = engine
        self.chat = chat
        self.parser = parser
        self.toolbox = toolbox
        self.rewards = rewards
        self.config = config
        self.tokenizer = tokenizer
        self.answer = answer
        self._rendered: tuple[Task | None, list[int]] = (None, [])

    async def run(
        self,
        task: Task,
        seat: Seat,
        *,
        temperature: float | None = None,
        on_turn: Callable[[Trajectory], Awaitable[None]] | None = None,
    ) -> Trajectory:
        """One whole episode, scored. A fault of the machinery comes back as outcome `infra_error`.

        Raises:
            EngineDied: the engine is gone, and with it every episode of the worker.

        Args:
            temperature: overrides the config's (evaluation).
            on_turn: awaited with the unfinished trajectory after each tool turn.
        """
        trajectory = Trajectory(
            id=seat.trajectory_id,
            group_id=seat.group_id,
            task_id=task.id,
            sample_index=seat.sample_index,
            prompt_ids=self._prompt_ids(task),
            temperature=self.config.temperature if temperature is None else temperature,
            metadata={"family": task.family, **task.metadata},
        )
        started = time.monotonic()
        try:
            async with self.toolbox.session(trajectory.id) as tools:
                await self._play(trajectory, task, seat, tools, on_turn)
            await self._score(trajectory, task)
        except EngineDied:
            raise  # not this episode's fault alone: the worker has no engine any more
        except (InfraError, EngineError) as error:
            log.warning("episode %s: %s", trajectory.id, error)
            trajectory.outcome = Outcome.INFRA_ERROR
            trajectory.metadata["infra_error"] = str(error)[:500]
        trajectory.timings["episode_s"] = time.monotonic() - started
        trajectory.check()
        return trajectory

    def _prompt_ids(self, task: Task) -> list[int]:
        """Rendered once for the samples of a group, which begin together."""
        if task is not self._rendered[0]:
            self._rendered = (task, self.chat.prompt_ids(task.messages))
        return list(self._rendered[1])

    async def _play(
        self,
        trajectory: Trajectory,
        task: Task,
        seat: Seat,
        tools: ToolboxSession,
        on_turn: Callable[[Trajectory], Awaitable[None]] | None,
    ) -> None:
        """Policy turn, tool turn, policy turn, … until an outcome is reached."""
        calls_made = 0
        while trajectory.outcome is None:
            turn = await self._policy_turn(trajectory, seat)
            if turn is None:
                return
            parsed = self.parser.parse(turn.text, first_call=calls_made)
            turn.calls, turn.call_errors = parsed.calls, parsed.errors
            self._settle(trajectory, turn, parsed, calls_made)
            if trajectory.outcome is not None:
                return
            calls_made += len(parsed.calls) + len(parsed.errors)
            await self._tool_turn(trajectory, turn, tools)
            if self.chat.verdict == "split" and trajectory.outcome is None:
                self._begin_afresh(trajectory, task)
            if on_turn is not None:
                await on_turn(trajectory)

    async def _policy_turn(self, trajectory: Trajectory, seat: Seat) -> Turn | None:
        """Samples one turn; None when no room is left for a single token (the outcome is then set)."""
        tokens = trajectory.context_ids
        room, limit = self._room(trajectory)
        if room <= 0 and not trajectory.turns:
            trajectory.outcome, trajectory.limit = Outcome.REWARD_MISSING, "prompt_tokens"
            trajectory.metadata["reward_missing"] = (
                f"a prompt of {len(tokens)} tokens leaves no room in "
                f"rollout.max_context_tokens={self.config.max_context_tokens}"
            )
            return None
        if room <= 0:
            trajectory.outcome, trajectory.limit = Outcome.LENGTH, limit
            return None
        index = len(trajectory.policy_turns)
        started = time.monotonic()
        made = await self.engine.generate(
            tokens,
            max_tokens=room,
            temperature=trajectory.temperature,
            top_p=self.config.top_p,
            top_k=self.config.top_k,
            stop_token_ids=self.chat.stop_token_ids,
            seed=seat.turn_seed(index) if trajectory.temperature > 0 else None,
            request_id=f"{trajectory.id}-{index}",
        )
        _add(trajectory.timings, "generate_s", time.monotonic() - started)
        turn = Turn(
            kind="policy",
            token_ids=made.token_ids,
            logprobs=made.logprobs,
            weight_versions=made.weight_versions,
            finish_reason=made.finish_reason,
            text=self.tokenizer.decode(made.token_ids, skip_special_tokens=False),
        )
        trajectory.turns.append(turn)
        if made.finish_reason == "length":
            trajectory.outcome, trajectory.limit = Outcome.LENGTH, limit
        elif made.finish_reason == "abort":  # ended from outside: what the policy would have said is not known
            trajectory.outcome = Outcome.CANCELLED
        return turn

    def _room(self, trajectory: Trajectory, *, turn_tokens: bool = True) -> tuple[int, LimitName]:
        """How many tokens the next turn may have, and the limit that says so."""
        response = sum(len(turn.token_ids) for turn in trajectory.turns if not turn.fresh_context)
        limits: list[tuple[int, LimitName]] = [
            (self.config.max_response_tokens - response, "response_tokens"),
            (self.config.max_context_tokens - len(trajectory.context_ids), "context_tokens"),
        ]
        if turn_tokens:
            limits.append((self.config.max_turn_tokens, "turn_tokens"))
        return min(limits, key=lambda limit: limit[0])

    def _settle(self, trajectory: Trajectory, turn: Turn, parsed: Parsed, calls_made: int) -> None:
        """Sets the outcome when `turn` was the last one."""
        if trajectory.outcome is not None:  # cut short: whatever the text holds, it is unfinished
            return
        asked = len(parsed.calls) + len(parsed.errors)
        if asked == 0:
            trajectory.answer = answer_of(trajectory, self.answer)
            if trajectory.answer is not None:
                trajectory.outcome = Outcome.ANSWERED
            elif self.parser.format_state(turn.text, turn.finish_reason).startswith("healthy"):
                trajectory.outcome = Outcome.NO_ANSWER
            else:
                trajectory.outcome = Outcome.FORMAT_ERROR
        elif calls_made + asked > self.config.max_calls or asked > self.config.max_calls_per_turn:
            trajectory.outcome, trajectory.limit = Outcome.TOOL_LIMIT, "calls"
        elif len(trajectory.policy_turns) >= self.config.max_turns:
            trajectory.outcome, trajectory.limit = Outcome.TOOL_LIMIT, "turns"

    async def _tool_turn(self, trajectory: Trajectory, turn: Turn, tools: ToolboxSession) -> None:
        """Runs the calls of `turn` in their order (they share one interpreter) and appends what the model will see."""
        started = time.monotonic()
        results = [await tools.call(call) for call in turn.calls]
        results += [
            ToolResult(call_id=f"error_{index}", name="", status="invalid_call", text=f"Error: {error.message}")
            for index, error in enumerate(turn.call_errors)
        ]
        _add(trajectory.timings, "tool_s", time.monotonic() - started)
        _add(trajectory.timings, "tool_queue_s", sum(result.queue_s for result in results))
        room, limit = self._room(trajectory, turn_tokens=False)
        room -= 1  # one token at least is left for an answer
        budget = min(self.config.max_observation_tokens, room)
        try:
            token_ids = await self._observe(turn, results, budget)
        except ObservationTooLong as error:  # not even an empty observation fits
            least = budget + error.needed - error.budget
            if least <= room:  # it does: `max_observation_tokens` cuts results, it ends no episode
                token_ids = await self._observe(turn, results, least)
            else:
                trajectory.outcome, trajectory.limit, token_ids = Outcome.LENGTH, limit, []
        trajectory.turns.append(Turn(kind="tool", token_ids=token_ids, results=results))

    def _begin_afresh(self, trajectory: Trajectory, task: Task) -> None:
        """For a template that rewrites history: the last tool turn becomes the whole prompt as the template now renders it."""
        turn = trajectory.turns[-1]
        turn.token_ids = self.chat.split_prompt_ids(task.messages, trajectory.turns)
        turn.fresh_context = True

    async def _observe(self, turn: Turn, results: list[ToolResult], budget: int) -> list[int]:
        cut = self.config.truncate_observation
        # Tokenising a long text takes milliseconds: it leaves the event loop to the other episodes.
        if sum(len(result.text) for result in results) > 4096:
            return await asyncio.to_thread(self.chat.observation_ids, turn, results, budget, cut)
        return self.chat.observation_ids(turn, results, budget, cut)

    async def _score(self, trajectory: Trajectory, task: Task) -> None:
        started = time.monotonic()
        await self.rewards.score(trajectory, task)
        trajectory.timings["reward_s"] = time.monotonic() - started


def _add(timings: dict[str, float], name: str, seconds: float) -> None:
    timings[name] = timings.get(name, 0.0) + seconds
