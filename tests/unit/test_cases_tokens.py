"""Cases that broke other systems: from an episode's tokens to what the loss gets."""

from __future__ import annotations

import pytest

from learner.sequence import sequences_from
from tests.episodes import ANSWER, CALL, SEAT, TASK, Script, call, ids_of, play, results, tiny
from toolrl import toolcalls
from toolrl.app.tiny_tokenizer import END, TAGS
from toolrl.trajectory import Outcome, Trajectory
from toolrl.trajectory_codec import decode, encode


def by_character(text: str) -> list[int]:
    """Ids that decode to `text`, as an engine may sample them: one token a character, the tags too (all but the end)."""
    body, end = text.removesuffix(END), END * text.endswith(END)
    with_tags_apart = [ids_of(character) for character in body]
    return [i for ids in with_tags_apart for i in ids] + ids_of(end)


async def test_a_split_that_the_tokenizer_would_not_make_reaches_the_loss_as_sampled() -> None:
    turn = by_character(CALL)
    assert turn != ids_of(CALL) and tiny().decode(turn) == CALL
    episode = await play(script=Script([turn, ANSWER]))
    (sequence,) = sequences_from([episode], [[1.0, -1.0]])
    start = sequence.prompt_length
    assert sequence.token_ids[:start].tolist() == episode.prompt_ids
    assert sequence.token_ids[start : start + len(turn)].tolist() == turn
    trained = sequence.token_ids[start:][sequence.loss_mask].tolist()
    assert trained == turn + ids_of(ANSWER)  # both spans with their end tokens, nothing of the gap
    assert sequence.rollout_logp[sequence.policy_mask].tolist() == pytest.approx(
        [value for each in episode.policy_turns for value in each.logprobs]
    )


@pytest.mark.parametrize("parser", ["hermes", "tagged", "fenced"])
async def test_a_call_is_found_however_its_tags_were_split_into_tokens(parser: str) -> None:
    reader = toolcalls.get(parser)
    written = reader.render([toolcalls.get("tagged").parse("<python>\n1\n</python>").calls[0]]) + END
    split = by_character(written)
    assert not set(split[:-1]) & {ids_of(tag)[0] for tag in TAGS}
    episode = await play(split, ANSWER, parser=parser)
    assert [c.arguments for c in episode.turns[0].calls] == [{"code": "1"}]
    assert episode.outcome is Outcome.ANSWERED


async def test_half_finished_episodes_have_masks_as_long_as_their_tokens_after_the_codec() -> None:
    kept: list[bytes] = []

    async def on_turn(unfinished: Trajectory) -> None:
        kept.append(encode(unfinished))

    script = Script([CALL, call("2 + 2"), ANSWER])
    await play(script=script, on_turn=on_turn)
    halves = [decode(payload) for payload in kept]
    assert [half.turns[-1].kind for half in halves] == ["policy", "tool"] * 2
    shown = [half.context_ids for half in halves if half.turns[-1].kind == "tool"]
    assert shown == [asked["prompt_ids"] for asked in script.asked[1:]]  # where it would go on
    for half in halves:
        half.check()
        assert half.outcome is None
        views = (half.response_ids, half.policy_mask(), half.turn_ids(), half.rollout_logprobs())
        assert len({len(view) for view in views}) == 1


async def test_without_tools_text_is_text() -> None:
    episode = await play(f"Two tags < /tool_call> and a box: {ANSWER}", tool_names=())
    assert (episode.outcome, episode.answer, len(episode.turns)) == (Outcome.ANSWERED, "408", 1)
    assert "Tools" not in tiny().decode(episode.prompt_ids)


async def test_without_tools_a_call_is_told_that_there_is_none() -> None:
    episode = await play(CALL, ANSWER, tool_names=())
    assert results(episode)[0].status == "invalid_call" and "unknown tool" in results(episode)[0].text
    assert episode.outcome is Outcome.ANSWERED


async def test_samples_of_one_group_with_different_prompts_are_each_scored_behind_their_own() -> None:
    hinted = type(TASK)(
        "t0", "products", [{"role": "system", "content": "Hint: 4."}, *TASK.messages[1:]], "408", "math"
    )
    group = [await play(ANSWER), await play(ANSWER, task=hinted)]
    assert group[0].group_id == group[1].group_id == SEAT.group_id
    first, second = sequences_from(group, [[1.0], [1.0]])
    assert first.token_ids[: first.prompt_length].tolist() == group[0].prompt_ids
    assert second.token_ids[: second.prompt_length].tolist() == group[1].prompt_ids
    assert group[0].prompt_ids != group[1].prompt_ids
    assert first.token_ids[first.prompt_length :].tolist() == second.token_ids[second.prompt_length :].tolist()
