"""Episodes played by a script in place of a policy; everything else (chat format, parser, tools, rewards) is the real thing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.engine import EngineDied, EngineError, Generated
from tests.episodes import ANSWER, CALL, LINES, QUESTION, SEAT, Script, call, ids_of, play, results, sampled, tiny
from toolrl import toolcalls
from toolrl.app.tiny_tokenizer import END
from toolrl.config import ToolConfig
from toolrl.conversation import ChatFormat
from toolrl.monitors import batch_metrics
from toolrl.tools import Toolbox
from toolrl.trajectory import Outcome, Trajectory


async def test_a_call_its_result_and_an_answer_are_the_templates_whole_render():
    seen: list[int] = []

    async def on_turn(unfinished: Trajectory) -> None:
        seen.append(len(unfinished.turns))

    script = Script([CALL, ANSWER])
    episode = await play(script=script, on_turn=on_turn)
    assert (episode.outcome, episode.answer, episode.limit) == (Outcome.ANSWERED, "408", None)
    assert episode.rewards == {"outcome": 1.0}
    assert [turn.kind for turn in episode.turns] == ["policy", "tool", "policy"]
    assert seen == [1, 2]  # every turn boundary before the end
    messages = [
        *QUESTION,
        {"role": "assistant", "content": CALL.removesuffix(END)},
        {"role": "tool", "content": "408"},
        {"role": "assistant", "content": ANSWER.removesuffix(END)},
    ]
    whole = tiny().apply_chat_template(
        messages, tools=Toolbox.build([ToolConfig("calculator"), ToolConfig(LINES)], None, 0).schemas,
        tokenize=False,
    )  # fmt: skip
    assert tiny().decode(episode.token_ids) + "\n" == whole
    # What the engine was shown is what was recorded, turn by turn.
    assert script.asked[0]["prompt_ids"] == episode.prompt_ids
    assert script.asked[1]["prompt_ids"] == episode.token_ids[: -len(episode.turns[-1].token_ids)]


async def test_what_was_sampled_is_recorded_as_it_came():
    pieces = [ids_of(character)[0] for character in "I think "]  # not the split that the tokenizer makes
    turn = [*pieces, *ids_of(CALL)]
    assert turn != ids_of("I think " + CALL)
    script = Script([turn, ANSWER])
    episode = await play(script=script)
    first, shown, last = episode.turns
    assert first.token_ids == turn
    assert first.text == "I think " + CALL
    assert first.logprobs == [-0.001 * i for i in range(len(turn))]
    assert first.weight_versions == [5] * len(turn) and last.weight_versions == [6] * len(last.token_ids)
    assert episode.policy_mask() == [True] * len(turn) + [False] * len(shown.token_ids) + [True] * len(last.token_ids)
    assert (first.calls[0].name, first.calls[0].arguments) == ("calculator", {"expression": "17 * 24"})
    assert [ask["seed"] for ask in script.asked] == [SEAT.turn_seed(0), SEAT.turn_seed(1)]
    assert script.asked[0]["seed"] != script.asked[1]["seed"]


async def test_after_the_rollout_the_history_still_holds_the_calls():
    episode = await play(CALL, call("1 / 0"), ANSWER)
    toolbox = Toolbox.build([ToolConfig("calculator")], None, 0)
    chat = ChatFormat(tiny(), tools=toolbox.schemas, parser=toolcalls.get("hermes"))
    said = chat.history(episode.turns)
    assert [message["role"] for message in said] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert [c["function"]["arguments"] for m in said for c in m.get("tool_calls", [])] == [
        {"expression": "17 * 24"},
        {"expression": "1 / 0"},
    ]
    assert [c.id for turn in episode.policy_turns for c in turn.calls] == ["call_0", "call_1"]


# Limits: each binds under its own name -------------------------------------------------------------------------------

LONG = "9 " * 300
LIMITS = {
    "turn_tokens": ((LONG,), {"max_turn_tokens": 30}, Outcome.LENGTH),
    "response_tokens": ((LONG,), {"max_response_tokens": 40}, Outcome.LENGTH),
    "context_tokens": ((LONG,), {"max_context_tokens": 120}, Outcome.LENGTH),
    "turns": ((CALL,), {"max_turns": 3}, Outcome.TOOL_LIMIT),
    "calls": ((CALL,), {"max_calls": 2}, Outcome.TOOL_LIMIT),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_each_limit_binds_under_its_own_name(name: str):
    turns, limits, outcome = LIMITS[name]
    episode = await play(*turns, **limits)
    assert (episode.outcome, episode.limit) == (outcome, name)
    assert episode.answer is None and episode.rewards == {"outcome": 0.0}
    metrics = batch_metrics([episode], learner_version=5)
    counted = {key: value for key, value in metrics.items() if key.startswith("limit/") and value}
    assert counted == {f"limit/{name}": 1.0}
    assert metrics["length/truncation_rate"] == float(outcome is Outcome.LENGTH)


async def test_more_calls_in_a_turn_than_allowed_reach_no_tool():
    episode = await play(CALL.removesuffix(END) * 3 + END, max_calls_per_turn=2)
    assert (episode.outcome, episode.limit) == (Outcome.TOOL_LIMIT, "calls")
    assert len(episode.turns) == 1 and len(episode.turns[0].calls) == 3


async def test_calls_that_could_not_be_read_count_as_calls():
    episode = await play(f"<tool_call>\n{{broken\n</tool_call>{END}", max_calls=2)
    assert (episode.outcome, episode.limit, len(results(episode))) == (Outcome.TOOL_LIMIT, "calls", 2)


async def test_budget_of_100_and_an_observation_of_500_leave_the_policy_its_share_of_100():
    script = Script([call("500", "lines"), "9 " * 300])
    episode = await play(script=script, max_response_tokens=100, max_observation_tokens=500)
    assert len(episode.response_ids) <= 100 and sampled(episode) <= 100
    assert results(episode)[0].truncated
    assert sum(ask["max_tokens"] for ask in script.asked[1:]) + len(episode.turns[0].token_ids) <= 100
    assert (episode.outcome, episode.limit) == (Outcome.LENGTH, "response_tokens")


@pytest.mark.parametrize("context", range(110, 260, 7))
async def test_prompt_and_response_never_exceed_the_context(context: int):
    script = Script([call("500", "lines"), LONG])
    episode = await play(script=script, max_context_tokens=context, max_turn_tokens=60)
    assert len(episode.token_ids) <= context
    assert all(len(ask["prompt_ids"]) + ask["max_tokens"] <= context for ask in script.asked)
    assert episode.outcome is Outcome.LENGTH and episode.limit in ("context_tokens", "turn_tokens")


async def test_a_long_observation_is_cut_to_its_tokens_and_says_so():
    episode = await play(call("5000", "lines"), ANSWER, max_observation_tokens=80)
    (result,) = results(episode)
    assert episode.outcome is Outcome.ANSWERED
    assert result.truncated and "tokens left out]" in result.text
    assert len(episode.turns[1].token_ids) <= 80
    assert result.text in tiny().decode(episode.turns[1].token_ids)


async def test_an_observation_limit_below_the_templates_own_part_shows_an_empty_result_and_goes_on():
    episode = await play(CALL, ANSWER, max_observation_tokens=3)
    assert (episode.outcome, episode.limit) == (Outcome.ANSWERED, None)
    assert (results(episode)[0].text, results(episode)[0].truncated) == ("", True)


async def test_a_call_that_leaves_no_room_for_an_observation_ends_with_the_limit_that_bound():
    episode = await play(CALL, ANSWER, max_response_tokens=len(ids_of(CALL)) + 5)
    assert (episode.outcome, episode.limit) == (Outcome.LENGTH, "response_tokens")
    assert [turn.kind for turn in episode.turns] == ["policy", "tool"] and episode.turns[1].token_ids == []
    assert len(episode.turns[0].calls) == 1


async def test_a_prompt_that_fills_the_context_is_the_tasks_fault():
    script = Script([ANSWER])
    episode = await play(script=script, max_context_tokens=20)
    assert script.asked == [] and episode.turns == []
    assert (episode.outcome, episode.limit) == (Outcome.REWARD_MISSING, "prompt_tokens")
    assert "rollout.max_context_tokens=20" in episode.metadata["reward_missing"]
    assert batch_metrics([episode], learner_version=5)["limit/prompt_tokens"] == 1.0


# What the model does wrong -------------------------------------------------------------------------------------------

WRONG = {
    "unknown tool": (call(name="calcualtor"), "unknown tool 'calcualtor'"),
    "missing name": (f'<tool_call>\n{{"arguments": {{}}}}\n</tool_call>{END}', "name"),
    "arguments no object": (f'<tool_call>\n{{"name": "calculator", "arguments": 3}}\n</tool_call>{END}', "arguments"),
    "missing argument": (f'<tool_call>\n{{"name": "calculator", "arguments": {{}}}}\n</tool_call>{END}', "expression"),
    "bad JSON": (f'<tool_call>\n{{"name": \n</tool_call>{END}', "JSON"),
    "unclosed": (f'<tool_call>\n{{"name": "calculator"{END}', "missing"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_call_is_an_observation_and_the_episode_goes_on(name: str):
    turn, told = WRONG[name]
    episode = await play(turn, ANSWER)
    (result,) = results(episode)
    assert (episode.outcome, episode.rewards) == (Outcome.ANSWERED, {"outcome": 1.0})
    assert result.status == "invalid_call" and told in result.text
    assert result.text in tiny().decode(episode.turns[1].token_ids)
    assert episode.turns[0].rewards["format"] == -0.1 and episode.turns[2].rewards["format"] == 0.0
    assert batch_metrics([episode], learner_version=5)["tool/status/invalid_call"] == 1.0


async def test_a_right_and_a_wrong_call_in_one_turn_are_both_answered():
    both = CALL.removesuffix(END) + f"\n<tool_call>\n{{nothing}}\n</tool_call>{END}"
    episode = await play(both, ANSWER)
    assert [(result.status, result.call_id) for result in results(episode)] == [
        ("ok", "call_0"),
        ("invalid_call", "error_0"),
    ]
    assert episode.outcome is Outcome.ANSWERED


async def test_a_call_cut_off_by_the_length_limit_is_length_and_no_tool_error():
    cut = len(ids_of(CALL)) - 6
    episode = await play(CALL, max_turn_tokens=cut)
    assert (episode.outcome, episode.limit) == (Outcome.LENGTH, "turn_tokens")
    assert len(episode.turns) == 1 and episode.turns[0].calls == []
    assert [error.kind for error in episode.turns[0].call_errors] == ["unclosed"]
    assert episode.turns[0].rewards == {"format": 0.0}


async def test_a_whole_call_at_the_length_limit_is_not_made():
    episode = await play(CALL, ANSWER, max_turn_tokens=len(ids_of(CALL)) - 1)  # all but the end token
    assert (episode.outcome, len(episode.turns), results(episode)) == (Outcome.LENGTH, 1, [])


async def test_an_answer_at_the_length_limit_is_length():
    episode = await play(ANSWER.removesuffix(END) + " 9" * 50, max_turn_tokens=30)
    assert (episode.outcome, episode.answer, episode.rewards) == (Outcome.LENGTH, None, {"outcome": 0.0})


async def test_text_without_an_answer_and_text_without_a_form_are_told_apart():
    assert (await play(f"I do not know.{END}")).outcome is Outcome.NO_ANSWER
    assert (await play(f"</tool_call> 408{END}")).outcome is Outcome.FORMAT_ERROR
    assert (await play(END)).outcome is Outcome.FORMAT_ERROR


async def test_the_answer_is_the_policys_own():
    """A tool that prints a box, an end token and tags: none of it is an answer, a control token or a call."""
    episode = await play(call("cheat", "lines"), f"I see.{END}")
    assert (episode.outcome, episode.answer, episode.rewards) == (Outcome.NO_ANSWER, None, {"outcome": 0.0})
    shown = episode.turns[1].token_ids
    assert shown.count(ids_of(END)[0]) == 1  # the template's own, after the observation
    assert ids_of("<tool_call>")[0] not in shown and shown.count(ids_of("</tool_response>")[0]) == 1
    assert (await play(ANSWER.removesuffix(END) + CALL, f"So.{END}")).outcome is Outcome.NO_ANSWER


async def test_a_tool_that_always_fails_is_seen_and_the_episode_ends_by_its_limits():
    episode = await play(CALL, failure_rate=1.0, max_calls=4)
    assert (episode.outcome, episode.limit) == (Outcome.TOOL_LIMIT, "calls")
    assert [result.status for result in results(episode)] == ["error"] * 4


async def test_code_between_tags_is_a_call_too():
    episode = await play(f"<python>\n17 * 24\n</python>{END}", ANSWER, parser="tagged")
    assert episode.outcome is Outcome.ANSWERED
    assert results(episode)[0].text.startswith("Error: unknown tool 'python'")


# What the machinery does wrong ---------------------------------------------------------------------------------------


async def test_a_tool_whose_machine_died_is_no_fault_of_the_policy():
    episode = await play(CALL, call("die", "lines"), ANSWER)
    assert (episode.outcome, episode.rewards) == (Outcome.INFRA_ERROR, {})
    assert "the machine is gone" in episode.metadata["infra_error"]
    assert all(turn.rewards == {} for turn in episode.turns)
    assert len(episode.turns) == 3  # what was recorded before stays


async def test_an_engine_that_failed_one_request_costs_one_episode():
    episode = await play(CALL, EngineError("engine e0: request failed"))
    assert (episode.outcome, episode.rewards, len(episode.turns)) == (Outcome.INFRA_ERROR, {}, 2)


async def test_an_engine_that_died_ends_the_worker_and_not_the_episode():
    with pytest.raises(EngineDied):
        await play(CALL, EngineDied("engine e0 is gone"))


@pytest.mark.parametrize("said", [ANSWER, "<tool_call>\n{", "half a sent"])
async def test_a_request_that_was_aborted_is_nothing_that_the_policy_said(said: str):
    episode = await play(said, finish="abort")
    assert (episode.outcome, episode.rewards, episode.answer) == (Outcome.CANCELLED, {}, None)
    assert len(episode.turns) == 1


async def test_a_cancelled_episode_is_cancelled():
    class Stuck(Script):
        async def generate(self, prompt_ids: list[int], *, max_tokens: int, **how: Any) -> Generated:
            await asyncio.sleep(60)
            raise AssertionError

    task = asyncio.create_task(play(script=Stuck([CALL])))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# Templates that rewrite history --------------------------------------------------------------------------------------


def split_format() -> tuple[Any, ChatFormat]:
    """The tiny model's template as many are: it leaves out what the model thought in earlier turns."""
    toolbox = Toolbox.build([ToolConfig("calculator"), ToolConfig(LINES)], None, 0)
    template = tiny().chat_template.replace(
        "if message.reasoning_content %}", "if message.reasoning_content and loop.last %}"
    )
    assert template != tiny().chat_template
    chat = ChatFormat(
        tiny(),
        tools=toolbox.schemas,
        chat_template=template,
        on_rewritten_history="split",
        parser=toolcalls.get("hermes"),
    )
    assert chat.verdict == "split"
    return tiny(), chat


async def test_history_that_the_template_rewrites_begins_a_fresh_context():
    tokenizer, chat = split_format()
    thought = "<think>\nI should compute.\n</think>\n\n"
    script = Script([thought + CALL, thought + call("400 + 8"), thought + ANSWER], tokenizer)
    episode = await play(script=script, tokenizer=tokenizer, chat=chat)
    assert episode.outcome is Outcome.ANSWERED, episode
    fresh = [turn.fresh_context for turn in episode.turns]
    assert fresh == [False, True, False, True, False]
    pieces = episode.segments()
    assert [ask["prompt_ids"] for ask in script.asked] == [piece.prompt_ids for piece in pieces]
    assert [piece.response_ids for piece in pieces] == [turn.token_ids for turn in episode.policy_turns]
    seen = tokenizer.decode(pieces[2].prompt_ids)
    assert "408" in seen and seen.count("17 * 24") >= 2  # the question's, and the call's


async def test_an_infra_error_in_a_split_episode_leaves_sound_records():
    tokenizer, chat = split_format()
    script = Script([CALL, call("die", "lines")], tokenizer)
    episode = await play(script=script, tokenizer=tokenizer, chat=chat)
    assert episode.outcome is Outcome.INFRA_ERROR
    episode.check()
