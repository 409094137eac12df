"""Episodes that go on at a turn boundary, played by a script: the prefix stays, the tools are where they were, the rest is
what it would have been."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.continuation import prefix_of
from actors.seat import Seat
from tests.episodes import ANSWER, CALL, SEAT, Script, call, play, results
from toolrl.app.tiny_tokenizer import END
from toolrl.config import ToolConfig
from toolrl.tools import function_schema
from toolrl.trajectory import Outcome, ToolResult, Trajectory
from toolrl.trajectory_codec import decode, encode

BRANCH = Seat("g7", 1, seed=5)
MEMORY = f"{__name__}:Memory"


class Memory:
    """A user's own tool that adds up what it is told, within an episode."""

    name = "memory"
    schema = function_schema("memory", "Adds up.", {"expression": "a number, or what it is to do"})
    draws = itertools.count()

    def __init__(self, config: ToolConfig, interpreter: Any) -> None:
        self.timeout_s = config.timeout_s

    @asynccontextmanager
    async def session(self, episode_id: str) -> Any:
        yield MemorySession()


class MemorySession:
    def __init__(self) -> None:
        self.sum = 0

    async def call(self, call: Any) -> ToolResult:
        asked = call.arguments["expression"]
        if asked == "random":
            return ToolResult(call.id, call.name, "ok", f"draw {next(Memory.draws)}")
        if asked == "too slow":
            return ToolResult(call.id, call.name, "timeout", f"printed {next(Memory.draws)} lines, then stopped")
        if asked == "long":
            return ToolResult(call.id, call.name, "ok", " ".join(str(n) for n in range(900)))
        self.sum += int(asked)
        return ToolResult(call.id, call.name, "ok", f"sum {self.sum}")


def add(number: int | str) -> str:
    return call(str(number), "memory")


PLAY = [add(1), CALL, add(10), add(100), ANSWER]


def script_from(turns: list[str], done: int) -> Script:
    """A policy that says what it would have said after `done` turns."""
    return Script(turns[done:], version=5 + done)


async def whole(turns: list[str] = PLAY, **settings: Any) -> Trajectory:
    return await play(script=Script(turns), tool_names=("calculator", MEMORY), **settings)


async def gone_on(
    progress: Trajectory, turns: list[str] = PLAY, seat: Seat = SEAT, **settings: Any
) -> tuple[Trajectory, Script]:
    script = script_from(turns, len(prefix_of(progress).policy_turns))
    progress = decode(encode(progress))  # as a peer would get it
    return await play(
        script=script, tool_names=("calculator", MEMORY), progress=progress, seat=seat, **settings
    ), script


def tokens_of(trajectory: Trajectory) -> list[Any]:
    return [(t.kind, t.token_ids, t.weight_versions, t.fresh_context) for t in trajectory.turns]


@pytest.mark.parametrize("done", range(5))
async def test_an_episode_goes_on_at_any_boundary_as_if_nothing_had_happened(done: int) -> None:
    original = await whole()
    episode, script = await gone_on(prefix_of(original, done))
    assert tokens_of(episode) == tokens_of(original)
    assert [t.logprobs for t in episode.turns[: 2 * done]] == [t.logprobs for t in original.turns[: 2 * done]]
    assert [r.text for r in results(episode)] == [r.text for r in results(original)]  # its memory too: sum 111
    assert results(episode)[-1].text == "sum 111"
    assert (episode.id, episode.outcome, episode.rewards) == (original.id, Outcome.ANSWERED, original.rewards)
    assert [turn.rewards for turn in episode.turns] == [turn.rewards for turn in original.turns]
    assert [ask["seed"] for ask in script.asked] == [SEAT.turn_seed(index) for index in range(done, 5)]
    assert [c.id for t in episode.policy_turns for c in t.calls] == [
        c.id for t in original.policy_turns for c in t.calls
    ]
    assert episode.metadata["continued_after"] == [done]
    assert "replay_changed" not in episode.metadata and "continued_after" not in original.metadata


async def test_calls_that_were_not_run_yet_are_run_where_the_episode_goes_on() -> None:
    original = await whole()
    progress = prefix_of(original, 3)
    progress.turns.pop()  # the turn that asked, without its results
    assert progress.turns[-1].kind == "policy"
    episode, script = await gone_on(progress)
    assert tokens_of(episode) == tokens_of(original) and len(script.asked) == 2


async def test_an_episode_may_move_at_every_boundary() -> None:
    original = await whole()
    progress = prefix_of(original, 0)
    for done in range(1, 5):
        episode, _ = await gone_on(progress)
        progress = prefix_of(episode, done)
    assert tokens_of(episode) == tokens_of(original)
    assert progress.metadata["continued_after"] == [0, 1, 2, 3]


async def test_a_branch_has_a_seat_of_its_own_and_the_prefix_of_its_origin() -> None:
    original = await whole()
    branch, script = await gone_on(prefix_of(original, 2), seat=BRANCH)
    assert (branch.id, branch.group_id, branch.sample_index) == ("g7.1", "g7", 1)
    assert tokens_of(branch)[:4] == tokens_of(original)[:4] and branch.prompt_ids == original.prompt_ids
    assert script.asked[0]["prompt_ids"] == original.prompt_ids + [i for t in original.turns[:4] for i in t.token_ids]
    assert [ask["seed"] for ask in script.asked] == [BRANCH.turn_seed(index) for index in range(2, 5)]
    assert branch.metadata["branched_from"] == {"id": original.id, "policy_turns": 2}
    assert branch.oldest_version == original.oldest_version == 5  # the oldest token's age, not the branch's


async def test_the_original_stays_as_it_was() -> None:
    original = await whole()
    before = encode(original)
    await gone_on(prefix_of(original, 2), seat=BRANCH)
    assert encode(original) == before


async def test_a_finished_episode_goes_on_before_the_turn_that_ended_it() -> None:
    original = await whole()
    cut = prefix_of(original)
    assert len(cut.policy_turns) == 4 and cut.turns[-1].kind == "tool"
    assert (cut.outcome, cut.answer, cut.rewards, cut.limit) == (None, None, {}, None)
    assert all(turn.rewards == {} for turn in cut.turns)
    with pytest.raises(ValueError, match="4 policy turns"):
        prefix_of(original, 5)


# Tools -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.5, 0.99])
async def test_failures_on_purpose_are_replayed_and_those_to_come_are_the_same(rate: float) -> None:
    turns = [*[add(10**power) for power in range(6)], ANSWER]
    original = await whole(turns, failure_rate=rate, max_turns=9)
    failed = [result.injected for result in results(original)]
    assert any(failed)
    for done in range(6):
        episode, _ = await gone_on(prefix_of(original, done), turns, failure_rate=rate, max_turns=9)
        assert tokens_of(episode) == tokens_of(original)
        assert [result.injected for result in results(episode)] == failed
        assert "replay_changed" not in episode.metadata
    branch, _ = await gone_on(prefix_of(original, 3), turns, seat=BRANCH, failure_rate=rate, max_turns=9)
    assert [result.injected for result in results(branch)][:3] == failed[:3]
    assert "replay_changed" not in branch.metadata


CHANGING = [add(1), add("random"), add(10), ANSWER]


async def test_a_call_that_gives_something_else_starts_the_episode_over() -> None:
    progress = prefix_of(await whole(CHANGING), 2)
    script = Script(CHANGING, version=9)
    episode = await play(script=script, tool_names=("calculator", MEMORY), progress=progress)
    assert episode.outcome is Outcome.ANSWERED and len(script.asked) == 4
    assert episode.oldest_version == 9  # nothing of the old prefix is left
    (change,) = episode.metadata["replay_changed"]
    assert (change["turn"], change["call_id"]) == (3, "call_1")
    assert change["recorded"] == f"ok: {results(progress)[1].text}" != change["replayed"]
    assert "continued_after" not in episode.metadata
    assert results(episode)[2].text == "sum 11"  # in a session that nobody had used


async def test_a_call_that_gives_something_else_may_be_accepted() -> None:
    progress = prefix_of(await whole(CHANGING), 2)
    episode, script = await gone_on(progress, CHANGING, on_changed_replay="accept")
    assert episode.outcome is Outcome.ANSWERED and len(script.asked) == 2
    assert tokens_of(episode)[:4] == tokens_of(progress)  # what the policy had seen stays what is trained
    assert len(episode.metadata["replay_changed"]) == 1


async def test_a_call_that_gives_something_else_may_be_refused() -> None:
    progress = prefix_of(await whole(CHANGING), 2)
    episode, script = await gone_on(progress, CHANGING, on_changed_replay="refuse")
    assert (episode.outcome, episode.rewards, script.asked) == (Outcome.CANCELLED, {}, [])
    assert len(episode.metadata["replay_changed"]) == 1


async def test_how_much_a_stopped_call_had_printed_is_no_change() -> None:
    turns = [add("too slow"), add(5), ANSWER]
    episode, _ = await gone_on(prefix_of(await whole(turns), 2), turns)
    assert episode.outcome is Outcome.ANSWERED and "replay_changed" not in episode.metadata


async def test_results_that_were_cut_for_the_model_compare_as_they_were_cut() -> None:
    two = add("long").removesuffix(END) + add(3)
    turns = [two, CALL, ANSWER]
    original = await whole(turns, max_observation_tokens=90)
    assert [result.truncated for result in results(original)] == [True, False, False]
    episode, _ = await gone_on(prefix_of(original, 2), turns, max_observation_tokens=90)
    assert tokens_of(episode) == tokens_of(original) and "replay_changed" not in episode.metadata


async def test_a_tool_that_dies_while_its_calls_are_replayed_is_no_fault_of_the_policy() -> None:
    class Broken(MemorySession):
        async def call(self, call: Any) -> ToolResult:
            raise KeyError("a defect")

    progress = prefix_of(await whole(), 1)
    before = MemorySession.call
    MemorySession.call = Broken.call  # type: ignore[method-assign]
    try:
        episode, script = await gone_on(progress)
    finally:
        MemorySession.call = before  # type: ignore[method-assign]
    assert (episode.outcome, script.asked) == (Outcome.INFRA_ERROR, [])
    assert tokens_of(episode) == tokens_of(progress)


# Boundaries and masks ---------------------------------------------------------------------------------------------------


async def test_on_turn_may_end_the_episode_and_what_it_raises_is_raised() -> None:
    async def old(trajectory: Trajectory) -> None:
        if len(trajectory.policy_turns) == 2:
            trajectory.outcome = Outcome.STALE

    episode = await whole(on_turn=old)
    assert (episode.outcome, len(episode.turns), episode.rewards) == (Outcome.STALE, 3, {})

    class Leaving(Exception): ...

    async def leave(trajectory: Trajectory) -> None:
        raise Leaving

    with pytest.raises(Leaving):
        await whole(on_turn=leave)


async def test_masks_of_an_episode_that_went_on_are_as_long_as_its_tokens() -> None:
    original = await whole()
    for done in range(5):
        episode, _ = await gone_on(prefix_of(original, done))
        n = len(episode.response_ids)
        assert len(episode.policy_mask()) == len(episode.turn_ids()) == len(episode.rollout_logprobs()) == n
        assert episode.policy_mask() == original.policy_mask()


async def test_limits_count_what_was_there_before() -> None:
    original = await whole(max_turns=3)
    assert (original.outcome, original.limit) == (Outcome.TOOL_LIMIT, "turns")
    episode, _ = await gone_on(prefix_of(original, 2), max_turns=3)
    assert (episode.outcome, episode.limit, len(episode.policy_turns)) == (Outcome.TOOL_LIMIT, "turns", 3)
    shortest = len(prefix_of(original, 2).response_ids) + 1
    episode, _ = await gone_on(prefix_of(original, 2), max_response_tokens=shortest)
    assert (episode.outcome, episode.limit, len(episode.response_ids)) == (
        Outcome.LENGTH, "response_tokens", shortest
    )  # fmt: skip


async def test_history_that_the_template_rewrites_goes_on_with_the_context_that_it_had() -> None:
    from tests.unit.test_episode import split_format

    tokenizer, chat = split_format()
    thought = "<think>\nI should compute.\n</think>\n\n"
    turns = [thought + CALL, thought + call("400 + 8"), thought + ANSWER]
    original = await play(script=Script(turns, tokenizer), tokenizer=tokenizer, chat=chat)
    assert [turn.fresh_context for turn in original.turns] == [False, True, False, True, False]
    for done in (1, 2):
        script = Script(turns[done:], tokenizer, version=5 + done)
        episode = await play(script=script, tokenizer=tokenizer, chat=chat, progress=prefix_of(original, done))
        assert tokens_of(episode) == tokens_of(original)
        assert script.asked[0]["prompt_ids"] == original.turns[2 * done - 1].token_ids
