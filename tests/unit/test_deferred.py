"""Results that come later, in hand-made episodes: order, masks, versions, credit, deadlines, ends, continuation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.continuation import prefix_of
from actors.parking import Slots
from tests.deferred import Slow, Timed, calls, deferred, release, shown
from tests.episodes import ANSWER, SEAT, Script, play, results, tiny
from tests.unit.test_continuation import MEMORY
from toolrl.app.tiny_tokenizer import END
from toolrl.config import ToolConfig
from toolrl.monitors import batch_metrics
from toolrl.tools import Toolbox
from toolrl.trajectory import Outcome, Trajectory
from toolrl.trajectory_codec import decode, encode

SUM = ("calculator", "17 * 24")
PARTS = ("outcome", "format", "call_failure", "timeout")


async def episode(script: Script, *tools: Any, **settings: Any) -> Trajectory:
    return await play(
        script=script,
        tool_names=("calculator", *(tools or [deferred()])),
        components=PARTS,
        **{"max_calls": 20, **settings},
    )


def whole_render(trajectory: Trajectory) -> str:
    """What the template makes of everything that was said and shown."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Compute."},
        {"role": "user", "content": "17 * 24?"},
    ]
    for turn in trajectory.turns:
        if turn.kind == "policy":
            messages.append({"role": "assistant", "content": turn.text.removesuffix(END)})
        messages += [{"role": "tool", "content": result.text} for result in turn.results]
    schemas = Toolbox.build([ToolConfig("calculator"), deferred()], None, 0).schemas
    return tiny().apply_chat_template(messages, tools=schemas, tokenize=False)


async def test_a_receipt_comes_at_once_and_the_result_at_the_first_boundary_after_it_came():
    script = Timed(
        [calls(("slow", "a"), text="I ask."), calls(SUM), calls(SUM), ANSWER], releases=[(), (), [["a"]], ()]
    )
    played = await episode(script)
    assert shown(played) == [
        [("call_0", "pending")],
        [("call_1", "ok")],
        [("call_2", "ok"), ("call_0", "ok")],
    ]
    receipt, late = results(played)[0], results(played)[-1]
    assert receipt.text == "call_0: slow is running; its result will come later under this id."
    assert late.text == "Result of call_0:\ncame: a" and late.wall_s > 0
    assert (played.outcome, played.answer) == (Outcome.ANSWERED, "408")
    # Token by token what the template writes, and what the engine was shown; masks and versions by turn.
    assert tiny().decode(played.token_ids) + "\n" == whole_render(played)
    for number, ask in enumerate(script.asked):
        before = [token for turn in played.turns[: 2 * number] for token in turn.token_ids]
        assert ask["prompt_ids"] == played.prompt_ids + before
    assert [set(turn.weight_versions) for turn in played.policy_turns] == [{5}, {6}, {7}, {8}]
    assert played.policy_mask() == [t.kind == "policy" for t in played.turns for _ in t.token_ids]
    assert all(not turn.logprobs and not turn.weight_versions for turn in played.turns if turn.kind == "tool")
    assert decode(encode(played)) == played


async def test_late_results_come_by_arrival_and_those_of_one_moment_by_call():
    asked = [("slow", word) for word in "abcd"]
    script = Timed([calls(*asked), calls(SUM), ANSWER], releases=[(), [["d"], ["c", "a"], ["b"]], ()])
    played = await episode(script)
    assert shown(played)[1] == [(f"call_{n}", "ok") for n in (4, 3, 0, 2, 1)]


async def test_the_credit_of_a_late_result_goes_to_the_turn_that_called():
    script = Timed(
        [calls(("slow", "good"), ("slow", "bad")), calls(SUM), calls(("slow", "bad2")), ANSWER, ANSWER],
        releases=[(), (), [["bad"]], [["good"], ["bad2"]], ()],
    )
    played = await episode(script)
    assert [turn.rewards["call_failure"] for turn in played.policy_turns] == [-0.1, 0.0, -0.1, 0.0, 0.0]
    assert [[r.text[-4:] for r in of_turn] for of_turn in played.results_of_turns()] == [
        [" bad", "good"],
        ["408"],
        ["bad2"],
        [],
        [],
    ]
    metrics = batch_metrics([played], learner_version=9)
    assert "tool/status/pending" not in metrics and metrics["tool/status/error"] == 0.5
    assert metrics["tool/calls_per_trajectory"] == 4


async def test_a_deadline_is_a_timeout_said_to_the_model_and_charged_to_the_caller():
    class Late(Timed):
        async def generate(self, prompt_ids: list[int], **how: Any) -> Any:
            if len(self.asked) == 1:
                await asyncio.sleep(0.05)
            return await super().generate(prompt_ids, **how)

    late = Late([calls(("slow", "a")), calls(SUM), ANSWER], releases=[(), (), [["a"]]])
    played = await episode(late, deferred(deadline_s=0.03))
    assert shown(played)[:2] == [[("call_0", "pending")], [("call_1", "ok"), ("call_0", "timeout")]]
    assert results(played)[-1].text == "Result of call_0:\nError: slow did not finish within 0.03 s"
    assert [turn.rewards["timeout"] for turn in played.policy_turns] == [-0.1, 0.0, 0.0]
    # The result came after that: nobody sees it, and it is counted.
    assert played.metadata["results_after_deadline"] == 1 and "calls_without_result" not in played.metadata
    assert "came" not in tiny().decode(played.token_ids)
    assert batch_metrics([played], learner_version=9)["tool/results_after_deadline"] == 1


async def test_a_deadline_ends_the_wait_of_a_turn_that_waits():
    played = await episode(Timed([calls(("slow", "a")), ANSWER]), deferred(mode="await", deadline_s=0.03))
    assert shown(played) == [[("call_0", "timeout")]]
    assert results(played)[0].text == "Error: slow did not finish within 0.03 s"
    assert played.turns[0].rewards["timeout"] == -0.1 and Slow.cancelled == ["a"]


async def test_an_answer_waits_for_what_is_outstanding_and_may_be_given_again():
    class Releases(Timed):
        async def generate(self, prompt_ids: list[int], **how: Any) -> Any:
            if len(self.asked) == 1:
                asyncio.get_running_loop().call_later(0.03, release, "b")
                asyncio.get_running_loop().call_later(0.06, release, "a")
            return await super().generate(prompt_ids, **how)

    wrong = f"\\boxed{{1}}{END}"
    played = await episode(Releases([calls(("slow", "a"), ("slow", "b")), wrong, ANSWER]))
    assert shown(played)[1] == [("call_1", "ok"), ("call_0", "ok")]
    assert (played.outcome, played.answer, len(played.policy_turns)) == (Outcome.ANSWERED, "408", 3)
    assert tiny().decode(played.token_ids) + "\n" == whole_render(played)


async def test_an_answer_may_stand_while_results_are_outstanding():
    script = Timed([calls(("slow", "a"), ("slow", "b")), ANSWER], releases=[(), [["b"]]])
    played = await episode(script, on_answer_with_pending="answer")
    assert (played.outcome, len(played.policy_turns)) == (Outcome.ANSWERED, 2)
    assert played.metadata["calls_without_result"] == ["call_0", "call_1"]
    assert Slow.cancelled == ["a"]  # nothing goes on after the episode
    assert batch_metrics([played], learner_version=9)["tool/calls_without_result"] == 2


@pytest.mark.parametrize("how", ["wait", "answer"])
async def test_a_turn_that_only_waits_is_given_what_it_waits_for(how: str):
    class Releases(Timed):
        async def generate(self, prompt_ids: list[int], **settings: Any) -> Any:
            asyncio.get_running_loop().call_later(0.03, release, "a")
            return await super().generate(prompt_ids, **settings)

    played = await episode(Releases([calls(("slow", "a")), f"I wait.{END}", ANSWER]), on_answer_with_pending=how)
    assert shown(played) == [[("call_0", "pending")], [("call_0", "ok")]] and played.answer == "408"


async def test_what_does_not_come_within_the_wait_is_a_timeout():
    script = Timed([calls(("slow", "a"), ("slow", "b")), ANSWER, ANSWER], releases=[(), [["b"]], ()])
    played = await episode(script, pending_deadline_s=0.03)
    assert shown(played)[1] == [("call_1", "ok"), ("call_0", "timeout")]
    assert played.outcome is Outcome.ANSWERED and len(played.policy_turns) == 3
    assert [turn.rewards["timeout"] for turn in played.policy_turns] == [-0.1, 0.0, 0.0]


async def test_an_answer_stands_where_no_turn_or_no_room_is_left():
    said = [calls(("slow", "a")), ANSWER]
    at_limit = await episode(Timed(said), max_turns=2)
    assert (at_limit.outcome, at_limit.answer, len(at_limit.turns)) == (Outcome.ANSWERED, "408", 3)
    size = len(at_limit.response_ids)
    full = await episode(Timed(said, releases=[(), [["a"]]]), max_response_tokens=size + 5)
    assert (full.outcome, full.answer, len(full.turns), full.limit) == (Outcome.ANSWERED, "408", 3, None)


async def test_wrong_calls_of_a_deferred_tool_are_told_at_once():
    wrong = f'<tool_call>\n{{"name": "slow", "arguments": {{}}}}\n</tool_call>{END}'
    played = await episode(Timed([wrong, ANSWER]))
    assert shown(played) == [[("call_0", "invalid_call")]] and Slow.called == []
    failing = await episode(Timed([calls(("slow", "a")), ANSWER]), deferred(failure_rate=1.0))
    assert shown(failing) == [[("call_0", "error")]] and results(failing)[0].injected


async def test_a_deferred_tool_whose_machine_died_is_no_fault_of_the_policy():
    script = Timed([calls(("slow", "die")), calls(SUM), ANSWER], releases=[(), [["die"]], ()])
    played = await episode(script)
    assert played.outcome is Outcome.INFRA_ERROR and "the machine is gone" in played.metadata["infra_error"]
    assert played.rewards == {} and len(played.turns) == 3


async def test_the_id_of_a_late_result_is_never_cut_away():
    for cut in ("head", "middle", "tail"):
        script = Timed([calls(("slow", "a" * 900)), calls(SUM), ANSWER], releases=[(), [["a" * 900]], ()])
        played = await episode(
            script, max_observation_tokens=90, max_turn_tokens=1500, max_response_tokens=4000,
            max_context_tokens=6000, truncate_observation=cut,
        )  # fmt: skip
        late = results(played)[-1]
        assert late.truncated and "esult of call_0" in late.text.replace("\n", " "), (cut, late.text)


async def test_a_wait_for_late_results_parks_the_episode():
    slots = Slots(1, park_after_s=0.01)

    class Releases(Timed):
        async def generate(self, prompt_ids: list[int], **settings: Any) -> Any:
            asyncio.get_running_loop().call_later(0.1, release, "a")
            return await super().generate(prompt_ids, **settings)

    async with slots.slot() as slot:
        playing = asyncio.create_task(episode(Releases([calls(("slow", "a")), ANSWER, ANSWER]), slot=slot))
        await asyncio.sleep(0)
        while not slots.parked and not playing.done():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        assert (slots.parked, slots.held) == (1, 0)
        played = await playing
    assert shown(played)[1] == [("call_0", "ok")] and played.timings["parked_s"] > 0


# Continuation --------------------------------------------------------------------------------------------------------

SAID = [calls(("slow", "a")), calls(SUM, ("slow", "b")), calls(SUM), ANSWER, ANSWER]
WHEN = [(), (), [["a"]], [["b"]], ()]


@pytest.mark.parametrize("done", range(5))
async def test_an_episode_with_late_results_goes_on_at_any_boundary(done: int):
    original = await episode(Timed(SAID, releases=WHEN))
    assert shown(original) == [
        [("call_0", "pending")],
        [("call_1", "ok"), ("call_2", "pending")],
        [("call_3", "ok"), ("call_0", "ok")],
        [("call_2", "ok")],
    ]
    script = Timed(SAID[done:], version=5 + done, releases=WHEN[done:])
    again = await episode(script, progress=decode(encode(prefix_of(original, done))), seat=SEAT)
    assert [(t.kind, t.token_ids, t.weight_versions) for t in again.turns] == [
        (t.kind, t.token_ids, t.weight_versions) for t in original.turns
    ]
    # What was delivered is not asked for again; what was not, is.
    assert Slow.called == {0: ["a", "b"], 1: ["a", "b"], 2: ["a", "b"], 3: ["b"], 4: []}[done]
    assert [turn.rewards for turn in again.policy_turns] == [turn.rewards for turn in original.policy_turns]


@pytest.mark.parametrize("done", range(5))
async def test_the_state_of_a_deferred_tool_is_rebuilt_in_the_calls_order(done: int):
    def told(number: str) -> str:
        return calls(("memory", number))

    said = [told("1"), calls(SUM), told("10"), ANSWER, ANSWER]
    memory = ToolConfig(MEMORY, mode="deferred", timeout_s=30.0)
    original = await episode(Timed(said), memory)
    assert [r.text.splitlines()[-1] for r in results(original) if r.text.startswith("Result")] == ["sum 1", "sum 11"]
    again = await episode(Timed(said[done:], version=5 + done), memory, progress=prefix_of(original, done))
    assert again.token_ids == original.token_ids and "replay_changed" not in again.metadata


async def test_a_deferred_call_that_gives_something_else_is_found():
    memory = ToolConfig(MEMORY, mode="deferred", timeout_s=30.0)
    said = [calls(("memory", "random")), calls(SUM), calls(SUM), ANSWER]
    original = await episode(Timed(said), memory)
    late = original.turns[3].results[-1]
    assert late.call_id == "call_0" and "draw" in late.text
    refused = await episode(
        Timed(said[2:], version=7), memory, progress=prefix_of(original, 2), on_changed_replay="refuse"
    )
    (change,) = refused.metadata["replay_changed"]
    assert (refused.outcome, change["turn"], change["call_id"]) == (Outcome.CANCELLED, 3, "call_0")


async def test_an_answer_that_waited_goes_on_waiting_elsewhere():
    saved: list[Trajectory] = []

    async def at_boundary(trajectory: Trajectory) -> None:
        saved.append(decode(encode(trajectory)))
        if len(trajectory.turns) == 3:
            release("a")

    original = await episode(Timed([calls(("slow", "a")), ANSWER, ANSWER]), on_turn=at_boundary)
    (progress,) = [t for t in saved if len(t.turns) == 3]  # the answer, before what it waits for

    asyncio.get_running_loop().call_later(0.05, release, "a")
    again = await episode(Timed([ANSWER], version=7), progress=progress)
    assert again.token_ids == original.token_ids and again.answer == "408"
