import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolrl.answers import answer_of
from toolrl.trajectory import CallError, ToolCall, ToolResult, Trajectory, Turn


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}", "42"),
        (r"first \boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a} and an open \boxed{b", "a"),
        (r"\boxed {7}<|im_end|>", "7"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"<think>maybe \boxed{1}</think>\boxed{2}", "2"),
        (r"<think>maybe \boxed{1}</think>I do not know", None),
        (r"maybe \boxed{1}</think>none", None),  # the prompt had opened the thinking
        (r"<think>maybe \boxed{1}", None),
        (r"\boxed{}", None),
        ("42", None),
        ("", None),
    ],
)
def test_boxed_gives_the_last_complete_box(text: str, answer: str | None):
    assert answer_of(text, "boxed") == answer


def test_tag_gives_the_last_tagged_answer():
    assert answer_of("<answer>1</answer> or <answer> 2 </answer>.", "tag") == "2"
    assert answer_of("<answer>1", "tag") is None
    assert answer_of("1</answer>", "tag") is None


def test_last_line_is_the_last_one_with_text():
    assert answer_of("so\n 42 <|im_end|>\n\n", "last_line") == "42"
    assert answer_of("<|im_end|>", "last_line") is None


def _episode(*turns: Turn) -> Trajectory:
    return Trajectory("t", "g", "task", 0, [1], list(turns))


def test_an_answer_in_a_tool_output_does_not_count():
    shown = Turn("tool", [2], results=[ToolResult("call_0", "python", "ok", r"\boxed{42}")])
    assert answer_of(_episode(Turn("policy", [1], text="no idea"), shown), "boxed") is None
    assert answer_of(shown, "boxed") is None


def test_a_turn_that_calls_a_tool_holds_no_answer():
    called = Turn("policy", [1], text=r"print('\boxed{1}')", calls=[ToolCall("call_0", "python", {})])
    failed = Turn("policy", [1], text=r"\boxed{1}", call_errors=[CallError("bad_json", "")])
    assert answer_of(_episode(called), "boxed") is None
    assert answer_of(_episode(failed), "boxed") is None
    assert answer_of(_episode(called, Turn("policy", [1], text=r"\boxed{2}")), "boxed") == "2"


def test_only_the_last_policy_turn_answers():
    first, last = Turn("policy", [1], text=r"\boxed{1}"), Turn("policy", [1], text="I do not know")
    assert answer_of(_episode(first, last), "boxed") is None
    assert answer_of(_episode(), "boxed") is None


_PIECES = st.lists(
    st.sampled_from([r"\boxed{", "{", "}", "\\", "<answer>", "</answer>", "<think>", "</think>", "x", "\n"])
)


@given(st.one_of(st.text(), _PIECES.map("".join)), st.sampled_from(["boxed", "tag", "last_line"]))
def test_any_text_gives_an_answer_or_none(text, how):
    answer = answer_of(text, how)
    assert answer is None or (answer.strip() == answer and answer)


def test_thousands_of_open_boxes_cost_no_more_than_their_length():
    start = time.monotonic()
    answer_of(r"\boxed{" * 20_000, "boxed")
    answer_of("<answer>" * 20_000 + "<think>" * 20_000, "tag")
    assert time.monotonic() - start < 2
