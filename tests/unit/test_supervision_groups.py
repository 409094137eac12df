"""Guided members of a group: which seats, what is recorded, what is trained."""

from __future__ import annotations

import pytest

from actors.replay.records import Entry
from toolrl.algorithms import group_advantages
from toolrl.config_supervision import HintConfig, OffPolicyConfig, SupervisionConfig
from toolrl.supervision.guidance import guided_by, own_samples
from toolrl.supervision.hints import hinted_task, note_hint, without_hint
from toolrl.supervision.off_policy import seated
from toolrl.supervision.seats import guide_of_seat
from toolrl.tasks import Task
from toolrl.trajectory import Outcome, ToolCall, ToolResult, Trajectory, Turn, staleness
from toolrl.trajectory_codec import decode, encode

TASK = Task("gcd-7", "gcd", [{"role": "system", "content": "Use python."}, {"role": "user", "content": "?"}], "4", "m")


def sampled(index: int = 0, reward: float = 0.0, prompt: list[int] = [1, 2]) -> Trajectory:  # noqa: B006
    turns = [
        Turn(
            "policy", [5, 6], logprobs=[-0.5, -0.25], weight_versions=[3, 4], calls=[ToolCall("call_0", "python", {})]
        ),
        Turn("tool", [8], results=[ToolResult("call_0", "python", "ok", "4")]),
        Turn("policy", [7], logprobs=[-0.125], weight_versions=[4], rewards={"format": 0.25}),
    ]
    rewards = {"outcome": reward}
    return Trajectory(
        f"g000001.{index}", "g000001", "gcd-7", index, prompt, turns, Outcome.ANSWERED, answer="4", rewards=rewards
    )


def put_in(reference: Trajectory, **changes) -> Trajectory:
    seat = {"trajectory_id": "g000002.3", "group_id": "g000002", "task_id": "gcd-7", "sample_index": 3}
    return seated(reference, **{**seat, "temperature": 0.7, "metadata": {"family": "gcd"}, **changes})


def test_the_last_seats_are_guided_and_the_first_are_the_policys_own() -> None:
    config = SupervisionConfig(off_policy=OffPolicyConfig(per_group=1), hint=HintConfig(per_group=2))
    kinds = [guide_of_seat(index, 8, config) for index in range(8)]
    assert kinds == [None] * 5 + ["hint", "hint", "reference"]
    assert {guide_of_seat(index, 8, SupervisionConfig()) for index in range(8)} == {None}


def test_a_seated_reference_keeps_its_tokens_and_nothing_that_was_said_of_it_elsewhere() -> None:
    reference = sampled(reward=1.0)
    before = encode(reference)
    made = put_in(reference)
    assert (made.token_ids, made.policy_mask(), made.turn_ids()) == (
        reference.token_ids,
        reference.policy_mask(),
        reference.turn_ids(),
    )
    assert (made.id, made.group_id, made.sample_index, made.temperature) == ("g000002.3", "g000002", 3, 0.7)
    assert made.reward == 0.0, "it is scored anew, in its group"
    assert made.metadata == {"family": "gcd", "guided": {"by": "reference", "source": "g000001.0"}}
    assert made.rollout_logprobs() == [0.0] * 4
    made.check()
    assert encode(reference) == before, "the shelf's copy is untouched"


def test_no_weights_sampled_a_reference_so_it_is_never_stale() -> None:
    made = decode(encode(put_in(sampled())))
    assert made.oldest_version is None
    assert staleness(made, 1000) == 0
    entry = Entry.of(made)
    assert (entry.oldest_version, entry.newest_version) == (None, None)
    own = Entry.of(sampled())
    assert (own.oldest_version, own.newest_version) == (3, 4)


def test_advantages_are_over_the_mixed_group() -> None:
    group = [sampled(index) for index in range(3)]
    reference = put_in(sampled())
    reference.rewards["outcome"] = 1.0
    for member in (*group, reference):
        member.turns[-1].rewards.clear()
    found = group_advantages("grpo", [*group, reference])
    # rewards 0 0 0 1: mean 1/4, std (ddof 1) 1/2
    assert [row[0] for row in found] == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-5)
    assert [set(row) for row in group_advantages("grpo", group)] == [{0.0}] * 3, "alone they had taught nothing"


def test_a_hint_stands_at_the_end_of_the_system_message() -> None:
    assert hinted_task(TASK, "Call.").messages[0] == {"role": "system", "content": "Use python.\nCall."}
    assert hinted_task(TASK, "Call.").messages[1:] == TASK.messages[1:]
    bare = Task("t", "f", [{"role": "user", "content": "?"}], "4", "m")
    assert hinted_task(bare, "Call.").messages == [{"role": "system", "content": "Call."}, *bare.messages]
    assert (hinted_task(TASK, "Call.").id, hinted_task(TASK, "Call.").question) == (TASK.id, TASK.question)


def test_a_hint_with_the_answer_is_given_only_where_the_answer_is_known() -> None:
    assert hinted_task(TASK, "It is {answer}.").messages[0]["content"].endswith("It is 4.")
    unknown = Task("t", "f", TASK.messages, {"steps": 3}, "m")
    assert hinted_task(unknown, "It is {answer}.") is None
    assert hinted_task(unknown, "Call.") is not None


def prompts_of(messages, turns=()) -> list[int]:
    """A chat format for the test: one token for every message."""
    return [100 + len(each["content"]) for each in messages] + [200 + len(turn.token_ids) for turn in turns]


def test_the_update_sees_the_sampled_tokens_after_the_prompt_without_the_hint() -> None:
    hinted = sampled(prompt=prompts_of(hinted_task(TASK, "Call.").messages))
    response, versions = hinted.response_ids, [turn.weight_versions for turn in hinted.turns]
    note_hint(hinted, TASK, prompts_of, prompts_of)
    hinted = decode(encode(hinted))  # as it comes out of the buffer
    bare = without_hint(hinted)
    assert bare.prompt_ids == prompts_of(TASK.messages) != hinted.prompt_ids
    assert bare.response_ids == response
    assert [turn.weight_versions for turn in bare.turns] == versions
    assert bare.rollout_logprobs() == hinted.rollout_logprobs()
    assert guided_by(bare) == "hint"


def test_every_context_of_a_rewritten_history_loses_the_hint() -> None:
    hinted = sampled(prompt=prompts_of(hinted_task(TASK, "Call.").messages))
    hinted.turns[1].fresh_context = True
    hinted.turns[1].token_ids = prompts_of(hinted_task(TASK, "Call.").messages, hinted.turns[:2])
    note_hint(hinted, TASK, prompts_of, prompts_of)
    first, second = without_hint(hinted).segments()
    assert first.prompt_ids == prompts_of(TASK.messages)
    assert second.prompt_ids == prompts_of(TASK.messages, hinted.turns[:2])
    assert (first.response_ids, second.response_ids) == ([5, 6], [7])


def test_what_is_not_hinted_is_trained_as_it_is() -> None:
    for each in (sampled(), put_in(sampled())):
        assert without_hint(each) is each


def test_the_policys_own_samples_are_told_from_the_guided_ones() -> None:
    own, hinted = sampled(), sampled(1)
    note_hint(hinted, TASK, prompts_of, prompts_of)
    assert [guided_by(each) for each in (own, hinted, put_in(own))] == [None, "hint", "reference"]
    assert own_samples([hinted, own, put_in(own)]) == [own]
