"""A correction that a critic wrote, held to what it says: its turns are played as an episode of the policy's would be.

Invariants:
- The turns go through the same `EpisodeRunner` as sampled ones: the run's sandbox runs the calls, the chat template's delta
  stands between the turns, the run's limits hold, the task's verifier checks the answer. Only the tokens come from the critic.
- The critic's words hold no control token: those of a turn are the chat template's own.
- Whatever is wrong with a correction is `Unfit` with one of `Reason`; nothing of it is trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from actors.continuation import prefix_of
from actors.engine import EngineError, Generated
from actors.episode import EpisodeRunner
from actors.seat import Seat
from actors.worker_setup import Setup
from toolrl.config import Named, RewardConfig, RunConfig
from toolrl.config_model_rewards import options_in_effect
from toolrl.conversation import clean_text
from toolrl.reward_records import is_right
from toolrl.rewards import RewardPipeline
from toolrl.rewards.provenance import uses_of_calls
from toolrl.rewards.result_use import known_texts
from toolrl.supervision.reflection.form import CorrectedTurn, Correction
from toolrl.tasks import AnswerChecker, Task
from toolrl.toolcalls.parser import call_id
from toolrl.trajectory import NOT_SAMPLED, Outcome, ToolCall, Trajectory

Reason = Literal[
    "control_tokens",  # the critic wrote a control string
    "no_thinking",  # a turn without, in a chat format whose prompt has opened it
    "bad_call",  # a call that the chat format cannot write, or the parser reads otherwise
    "kept_turns",  # there are not so many to keep, or their calls give something else now
    "failed_call",  # a call that did not come back ok
    "unfinished",  # no answer, or one of the run's limits
    "wrong_answer",
    "too_few_calls",
    "unused_results",  # nothing was written that only a result told
    "infra",  # a sandbox died, or the verifier gave no score
]


class Unfit(Exception):
    """A correction that is not trained."""

    def __init__(self, reason: Reason, why: str) -> None:
        super().__init__(f"{reason}: {why}")
        self.reason = reason


@dataclass(frozen=True)
class _Written:
    """One turn of the critic's as tokens, and the calls that must be read in them."""

    token_ids: list[int]
    calls: list[ToolCall]


class _Dictation:
    """In the place of an engine: the written turns, one after the other."""

    def __init__(self, turns: Sequence[_Written]) -> None:
        self._turns = iter(turns)

    async def generate(self, prompt_ids: list[int], *, max_tokens: int, **_: Any) -> Generated:
        turn = next(self._turns, None)
        if turn is None:
            raise EngineError("the correction has no more turns")
        ids = turn.token_ids[:max_tokens]
        finish = "stop" if len(ids) == len(turn.token_ids) else "length"
        return Generated(ids, [0.0] * len(ids), [NOT_SAMPLED] * len(ids), finish, NOT_SAMPLED)


class Corrector:
    """`corrected` makes a trajectory of a correction, or says why not."""

    def __init__(self, config: RunConfig, setup: Setup, checker: AnswerChecker) -> None:
        """`setup`: with tools as `tools_of_corrections` wants them, and its sandbox open."""
        self.settings = config.supervision.reflection
        self.setup = setup
        # Kept turns whose calls give something else now are another trajectory than the critic saw.
        self.limits = replace(config.rollout, on_changed_replay="refuse")
        self.answer = config.tasks.answer
        outcome = Named("outcome", options_in_effect(config.rewards, "outcome") or {})
        self.outcome = RewardPipeline(RewardConfig([outcome], deadline_s=config.rewards.deadline_s), checker)

    async def corrected(self, failed: Trajectory, task: Task, correction: Correction) -> Trajectory:
        """The correction as a trajectory that was played, found right, and keeps the first turns of `failed`.

        Raises:
            Unfit: says what is wrong with it.
        """
        try:
            prefix = prefix_of(failed, correction.keep)
        except ValueError as error:
            raise Unfit("kept_turns", str(error)) from error
        made = sum(len(turn.calls) + len(turn.call_errors) for turn in prefix.policy_turns)
        written = list(self._written(correction.turns, made))
        runner = EpisodeRunner(
            _Dictation(written),
            self.setup.chat,
            self.setup.parser,
            self.setup.toolbox,
            self.outcome,
            self.limits,
            tokenizer=self.setup.tokenizer,
            answer=self.answer,
        )
        seat = Seat(f"{failed.id}-corrected", 0, seed=0)
        played = await runner.run(task, seat, progress=prefix if correction.keep else None, temperature=1.0)
        self._check(played, task, written, correction.keep)
        played.metadata["corrects"] = {"trajectory": failed.id, "kept": correction.keep}
        return played

    def _written(self, turns: Sequence[CorrectedTurn], calls_before: int) -> Iterator[_Written]:
        chat = self.setup.chat
        for turn in turns:
            calls = [
                ToolCall(call_id(calls_before + number), call.name, call.arguments)
                for number, call in enumerate(turn.calls)
            ]
            calls_before += len(calls)
            for text in (turn.text, turn.thinking, *(text for call in turn.calls for text in _texts(call))):
                self._refuse_controls(text)
            if chat.checked.thinking == "opened" and not turn.thinking.strip():
                raise Unfit("no_thinking", "the model would learn to think no more")
            # Some templates have no place for words beside calls.
            text = "" if calls and not chat.checked.dialect.text_beside_calls else clean_text(turn.text)
            try:
                ids = chat.assistant_ids(text, calls, clean_text(turn.thinking))
            except Exception as error:  # a template raises what it likes
                raise Unfit("bad_call", f"the chat format cannot write it: {error}") from error
            yield _Written(ids, calls)

    def _refuse_controls(self, text: str) -> None:
        clean = clean_text(text)
        ids = self.setup.tokenizer(clean, add_special_tokens=False).input_ids
        if self.setup.chat.observation_text(clean)[0] != clean or not self.setup.chat.control_token_ids.isdisjoint(ids):
            raise Unfit("control_tokens", repr(clean[:200]))

    def _check(self, played: Trajectory, task: Task, written: Sequence[_Written], kept: int) -> None:
        if played.outcome in (Outcome.INFRA_ERROR, Outcome.REWARD_MISSING):
            raise Unfit("infra", str(played.metadata.get("infra_error") or played.metadata.get("reward_missing")))
        if played.outcome is Outcome.CANCELLED:
            raise Unfit("kept_turns", str(played.metadata.get("replay_changed")))
        for turn, meant in zip(played.policy_turns[kept:], written, strict=False):
            if turn.token_ids == meant.token_ids and (turn.calls != meant.calls or turn.call_errors):
                raise Unfit("bad_call", f"the parser reads {turn.text[:200]!r} otherwise")
        results = [result for turns in played.results_of_turns()[kept:] for result in turns]
        if bad := next((result for result in results if result.status != "ok"), None):
            raise Unfit("failed_call", f"{bad.name}: {bad.status}: {bad.text[:200]}")
        if played.outcome is not Outcome.ANSWERED:
            raise Unfit("unfinished", f"{played.outcome} {played.limit or ''}")
        if not is_right(played):
            raise Unfit("wrong_answer", str(played.answer))
        if sum(len(turn.calls) for turn in played.policy_turns) < self.settings.min_calls:
            raise Unfit("too_few_calls", f"less than {self.settings.min_calls}")
        if self.settings.must_use_results and not _uses_results(played, task):
            raise Unfit("unused_results", "the calls told nothing that was written later and not known before")


def _uses_results(played: Trajectory, task: Task) -> bool:
    return any(each.use for each in uses_of_calls(played, known_texts(task), trivial=True))


def _texts(call: Any) -> Iterator[str]:
    """All that a call puts into the text: each string alone, and the arguments as they are written."""
    yield call.name
    yield json.dumps(call.arguments, ensure_ascii=False)
    waiting: list[Any] = [call.arguments]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]


def tools_of_corrections(config: RunConfig) -> RunConfig:
    """The run's settings for corrections: calls whose results come at once and fail on nobody's purpose, and a sandbox of
    their own that keeps nothing warm."""
    tools = [replace(tool, failure_rate=0.0, mode="await", deadline_s=None, delay={}) for tool in config.tools]
    most = min(config.supervision.reflection.concurrency, config.sandbox.max_sessions)
    return replace(config, tools=tools, sandbox=replace(config.sandbox, min_sessions=0, max_sessions=most))
