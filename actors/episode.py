"""One episode: generation interleaved with tool calls, recorded token by token.

Invariants:
- What the engine sampled is appended as it came; what it did not sample enters only as `ChatFormat.observation_ids`.
- Every limit has its own outcome, and the limit that bound is recorded by name.
- A fault of the machinery (engine, sandbox) ends this episode as `infra_error`, and no other episode; a fault of the
  model is an observation.
- Turns are appended whole: whenever the event loop is free, the trajectory ends at a turn boundary, from which
  `actors.continuation` can go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from actors.continuation import Change, as_metadata, changes_while_parked, continued, rebuild
from actors.engine import EngineDied, EngineError, Generated
from actors.episode_tools import EpisodeTools
from actors.observation import observe, room_for_turn
from actors.parking import Slot
from actors.seat import Seat
from toolrl.answers import How, answer_of
from toolrl.config import RolloutConfig
from toolrl.conversation import ChatFormat
from toolrl.rewards import RewardPipeline
from toolrl.tasks import Task
from toolrl.toolcalls import Parser
from toolrl.tools import InfraError, Toolbox
from toolrl.trajectory import Outcome, Trajectory, Turn

log = logging.getLogger(__name__)

# Awaited with the unfinished trajectory at each turn boundary. It may set the outcome, which ends the episode there.
OnTurn = Callable[[Trajectory], Awaitable[None]]


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
        progress: Trajectory | None = None,
        on_turn: OnTurn | None = None,
        slot: Slot | None = None,
        keep_when_parked: bool = False,
    ) -> Trajectory:
        """One whole episode, scored. A fault of the machinery comes back as outcome `infra_error`.

        Raises:
            EngineDied: the engine is gone, and with it every episode of the worker.

        Args:
            temperature: overrides the config's (evaluation). Of an episode that goes on, the recorded one stays.
            progress: goes on from the last turn boundary of this trajectory (`continuation.prefix_of` chooses another):
                in its own seat, or as a branch in a new one.
            on_turn: see `OnTurn`. What it raises is raised.
            slot: the place that it holds, and gives up while it waits long for a tool.
            keep_when_parked: it gives up nothing else meanwhile.
        """
        started = time.monotonic()
        trajectory = self._begun(task, seat, temperature) if progress is None else continued(progress, seat)
        changes: list[Change] = []
        try:
            async with self.toolbox.session(trajectory.id, keep_when_parked=keep_when_parked) as session:
                tools = EpisodeTools(session, self.config, slot)
                if progress is not None:
                    changes = await self._rebuild(trajectory, tools)
                if not changes or self.config.on_changed_replay == "accept":
                    await self._play(trajectory, task, seat, tools, on_turn)
                    tools.note(trajectory)
                    if lost := changes_while_parked(trajectory, session):
                        changes += lost
                        trajectory.metadata["replay_changed"] = as_metadata(changes)
            if trajectory.outcome is None and self.config.on_changed_replay == "restart":
                # What cannot be brought back is not given up a second time.
                again = await self.run(
                    task, seat, temperature=temperature, on_turn=on_turn, slot=slot, keep_when_parked=True
                )
                again.metadata["replay_changed"] = as_metadata(changes)
                return again
            if trajectory.outcome is None:
                trajectory.outcome = Outcome.CANCELLED
            await self.score(trajectory, task)
        except EngineDied:
            raise  # not this episode's fault alone: the worker has no engine any more
        except (InfraError, EngineError) as error:
            log.warning("episode %s: %s", trajectory.id, error)
            trajectory.outcome = Outcome.INFRA_ERROR
            trajectory.metadata["infra_error"] = str(error)[:500]
        _add(trajectory.timings, "episode_s", time.monotonic() - started)
        trajectory.check()
        return trajectory

    def _begun(self, task: Task, seat: Seat, temperature: float | None) -> Trajectory:
        return Trajectory(
            id=seat.trajectory_id,
            group_id=seat.group_id,
            task_id=task.id,
            sample_index=seat.sample_index,
            prompt_ids=self.prompt_ids(task),
            temperature=self.config.temperature if temperature is None else temperature,
            metadata={"family": task.family, **task.metadata},
        )

    async def _rebuild(self, trajectory: Trajectory, tools: EpisodeTools) -> list[Change]:
        """Brings the tools to where the recorded calls left them; what came out differently goes into the metadata."""
        started = time.monotonic()
        see = partial(observe, chat=self.chat, config=self.config)
        changes = await rebuild(trajectory, tools.session, see, as_late=tools.as_late)
        _add(trajectory.timings, "replay_s", time.monotonic() - started)
        if changes:
            log.info("episode %s: a replayed call gave something else: %s", trajectory.id, changes[0])
            trajectory.metadata["replay_changed"] = as_metadata(changes)
        return changes

    def prompt_ids(self, task: Task) -> list[int]:
        """The prompt of a task. Rendered once for the samples of a group, which begin together."""
        if task is not self._rendered[0]:
            self._rendered = (task, self.chat.prompt_ids(task.messages))
        return list(self._rendered[1])

    async def _play(
        self, trajectory: Trajectory, task: Task, seat: Seat, tools: EpisodeTools, on_turn: OnTurn | None
    ) -> None:
        """Policy turn, tool turn, policy turn, … until an outcome is reached, or a tool's state is lost."""
        while trajectory.outcome is None and not tools.changed:
            if trajectory.turns and trajectory.turns[-1].kind == "policy":  # taken up before its calls were run
                await self._tool_turn(trajectory, task, tools)
            else:
                await self._policy_turn(trajectory, seat, tools)
            if on_turn is not None and trajectory.outcome is None:
                await on_turn(trajectory)

    async def _policy_turn(self, trajectory: Trajectory, seat: Seat, tools: EpisodeTools) -> None:
        """Samples one turn and settles what follows from it; sets the outcome where no room is left for a token."""
        tokens = trajectory.context_ids
        room, limit = room_for_turn(trajectory, self.config)
        if room <= 0 and not trajectory.turns:
            trajectory.outcome, trajectory.limit = Outcome.REWARD_MISSING, "prompt_tokens"
            trajectory.metadata["reward_missing"] = (
                f"a prompt of {len(tokens)} tokens leaves no room in "
                f"rollout.max_context_tokens={self.config.max_context_tokens}"
            )
            return
        if room <= 0:
            trajectory.outcome, trajectory.limit = Outcome.LENGTH, limit
            return
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
        calls_before = sum(len(each.calls) + len(each.call_errors) for each in trajectory.policy_turns)
        parsed = self.parser.parse(turn.text, first_call=calls_before)
        turn.calls, turn.call_errors = parsed.calls, parsed.errors
        trajectory.turns.append(turn)
        if made.finish_reason == "length":
            trajectory.outcome, trajectory.limit = Outcome.LENGTH, limit
        elif made.finish_reason == "abort":  # ended from outside: what the policy would have said is not known
            trajectory.outcome = Outcome.CANCELLED
        else:
            self._settle(trajectory, turn, calls_before, tools)

    def _settle(self, trajectory: Trajectory, turn: Turn, calls_before: int, tools: EpisodeTools) -> None:
        """Sets the outcome when `turn`, which came to its own end, was the last one."""
        asked = len(turn.calls) + len(turn.call_errors)
        if asked == 0:
            if not (tools.outstanding and self._waits(trajectory, turn)):
                self._conclude(trajectory, turn)
        elif calls_before + asked > self.config.max_calls or asked > self.config.max_calls_per_turn:
            trajectory.outcome, trajectory.limit = Outcome.TOOL_LIMIT, "calls"
        elif len(trajectory.policy_turns) >= self.config.max_turns:
            trajectory.outcome, trajectory.limit = Outcome.TOOL_LIMIT, "turns"

    def _waits(self, trajectory: Trajectory, turn: Turn) -> bool:
        """Whether a turn that calls nothing is followed by the results that are outstanding: the policy asked for nothing
        else, or its answer is not to be taken before it has seen them."""
        if len(trajectory.policy_turns) >= self.config.max_turns:
            return False
        if answer_of(trajectory, self.answer) is None:
            return self.parser.format_state(turn.text, turn.finish_reason).startswith("healthy")
        return self.config.on_answer_with_pending == "wait"

    def _conclude(self, trajectory: Trajectory, turn: Turn) -> None:
        """Sets the outcome of an episode whose last turn calls nothing."""
        trajectory.answer = answer_of(trajectory, self.answer)
        if trajectory.answer is not None:
            trajectory.outcome = Outcome.ANSWERED
        elif self.parser.format_state(turn.text, turn.finish_reason).startswith("healthy"):
            trajectory.outcome = Outcome.NO_ANSWER
        else:
            trajectory.outcome = Outcome.FORMAT_ERROR

    async def _tool_turn(self, trajectory: Trajectory, task: Task, tools: EpisodeTools) -> None:
        """Appends what the model sees after its last turn (see `EpisodeTools.answer`)."""
        turn = trajectory.turns[-1]
        started = time.monotonic()
        results = await tools.answer(turn)
        _add(trajectory.timings, "tool_s", time.monotonic() - started)
        _add(trajectory.timings, "tool_queue_s", sum(result.queue_s for result in results))
        waited = not (turn.calls or turn.call_errors)
        if tools.changed:
            return
        token_ids, limit = await observe(trajectory, results, self.chat, self.config) if results else ([], None)
        if waited and not token_ids:  # nothing came, or there is no room to show it: the policy has said its last
            self._conclude(trajectory, turn)
            return
        trajectory.turns.append(Turn(kind="tool", token_ids=token_ids, results=results))
        if limit is not None:
            trajectory.outcome, trajectory.limit = Outcome.LENGTH, limit
        elif self.chat.verdict == "split":
            self._begin_afresh(trajectory, task)

    def _begin_afresh(self, trajectory: Trajectory, task: Task) -> None:
        """For a template that rewrites history: the last tool turn becomes the whole prompt as the template now renders it."""
        turn = trajectory.turns[-1]
        turn.token_ids = self.chat.split_prompt_ids(task.messages, trajectory.turns)
        turn.fresh_context = True

    async def score(self, trajectory: Trajectory, task: Task) -> None:
        """Gives a finished trajectory the rewards of the run."""
        started = time.monotonic()
        await self.rewards.score(trajectory, task)
        trajectory.timings["reward_s"] = time.monotonic() - started


def _add(timings: dict[str, float], name: str, seconds: float) -> None:
    timings[name] = timings.get(name, 0.0) + seconds
