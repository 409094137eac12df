"""References by task: bounded, keyed by the prompt's tokens, the same after a resume."""

from __future__ import annotations

import random

import pytest

from toolrl.supervision.references import References, is_reference
from toolrl.trajectory import CallError, Outcome, ToolCall, ToolResult, Trajectory, Turn


def trajectory(prompt: list[int], response: list[int] = [7, 8], **changes) -> Trajectory:  # noqa: B006
    turn = Turn("policy", response, logprobs=[-0.5] * len(response), weight_versions=[3] * len(response))
    made = Trajectory("t", "g000001", "gcd-1", 0, prompt, [turn], Outcome.ANSWERED, answer="4")
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def solved_trace(result: str = "4", status: str = "ok", kind: str = "solved") -> Trajectory:
    call = Turn("policy", [5], logprobs=[0.0], weight_versions=[0], calls=[ToolCall("call_0", "python", {})])
    shown = Turn("tool", [6], results=[ToolResult("call_0", "python", status, result)])  # type: ignore[arg-type]
    return trajectory([1], turns=[call, shown, trajectory([1]).turns[0]], metadata={"kind": kind})


def test_the_task_is_the_prompt_and_not_its_id() -> None:
    shelf = References()
    shelf.give([trajectory([1, 2], [9])])
    assert shelf.for_task([1, 2]).response_ids == [9]
    assert shelf.for_task([1, 3]) is None  # the same task id, another question


def test_the_first_given_and_the_newest_own_stay_and_the_given_goes_first() -> None:
    shelf = References(max_tasks=2)
    assert shelf.give([trajectory([1], [5]), trajectory([1], [6]), trajectory([2]), trajectory([3])]) == 2
    assert shelf.for_task([1]).response_ids == [5]
    assert shelf.for_task([3]) is None
    for prompt, response in (([3], [5]), ([4], [5]), ([3], [6]), ([5], [5]), ([1], [6])):
        shelf.keep([trajectory(prompt, response)])
    assert shelf.for_task([3]) is None and shelf.for_task([4]) is None  # 5 and 1 are newer
    assert shelf.for_task([5]) is not None
    assert shelf.for_task([1]).response_ids == [5]
    assert shelf.counts() == (3, 2)


def test_a_newer_own_trajectory_takes_the_place_of_the_older_one() -> None:
    shelf = References()
    shelf.keep([trajectory([1], [5])])
    shelf.keep([trajectory([1], [6])])
    assert shelf.for_task([1]).response_ids == [6]


def test_the_same_draw_gives_the_same_sample_and_no_task_twice() -> None:
    shelf = References()
    shelf.give(trajectory([n]) for n in range(20))
    shelf.keep(trajectory([n]) for n in range(10, 30))
    drawn = [each.prompt_ids for each in shelf.sample(8, random.Random("a"))]
    assert drawn == [each.prompt_ids for each in shelf.sample(8, random.Random("a"))]
    assert drawn != [each.prompt_ids for each in shelf.sample(8, random.Random("b"))]
    everything = [each.prompt_ids[0] for each in shelf.sample(99, random.Random(0))]
    assert sorted(everything) == list(range(30))


def test_what_a_checkpoint_holds_gives_the_same_samples_and_the_same_evictions() -> None:
    shelf = References(max_tasks=4)
    shelf.keep(trajectory([n], [n, 2]) for n in range(6))
    shelf.keep([trajectory([3], [9])])
    again = References(max_tasks=4)
    again.keep([trajectory([77])])  # from after the checkpoint
    again.load_own_state(shelf.own_state())
    for each in (shelf, again):
        each.keep([trajectory([50])])
    assert again.sample(9, random.Random(1)) == shelf.sample(9, random.Random(1))
    assert again.for_task([2]) is None and again.for_task([77]) is None


@pytest.mark.parametrize(
    ("candidate", "good"),
    [
        (trajectory([1], rewards={"outcome": 2.0}), True),
        (trajectory([1], rewards={"outcome": 1.0}), False),  # of 2: half right
        (trajectory([1], rewards={"outcome": 2.0}, outcome=Outcome.LENGTH), False),
        (trajectory([1]), True),  # never scored
        (solved_trace(), True),
        (solved_trace(result="5"), False),  # guessed after all
        (solved_trace(status="error"), False),
        (solved_trace(kind="wrong_code"), False),
        (trajectory([1], metadata={"kind": "direct"}), False),
    ],
)
def test_only_a_well_formed_right_trajectory_is_a_reference(candidate: Trajectory, good: bool) -> None:
    assert is_reference(candidate, full_outcome=2.0) is good


def test_a_reference_makes_no_malformed_call_and_as_many_calls_as_are_asked_for() -> None:
    assert is_reference(solved_trace(), min_calls=1) and not is_reference(solved_trace(), min_calls=2)
    polluted = solved_trace()
    polluted.turns[0].call_errors = [CallError("bad_json", "x")]
    assert not is_reference(polluted)
