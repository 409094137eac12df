"""Which tokens steer a model, and where in a recorded turn each may stand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.chat_templates import TOOLS, format_of, templates, tokenizer_for
from toolrl import toolcalls
from toolrl.app.tiny_tokenizer import build_tokenizer
from toolrl.conversation import ChatFormat
from toolrl.monitors.control_tokens import ControlTokens
from toolrl.monitors.legal_slots import sequence_slots, turn_slots

TOKENIZER = build_tokenizer()
HERMES = toolcalls.get("hermes")
CONTROL = ControlTokens.of(TOKENIZER, ChatFormat(TOKENIZER, tools=TOOLS, parser=HERMES), HERMES)
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>'


def ids(text: str) -> np.ndarray:
    return np.asarray(TOKENIZER.encode(text, add_special_tokens=False), dtype=np.int64)


def legal(text: str, token: str, **options: bool) -> list[str]:
    """The tokens, as text, in whose place `token` might have stood."""
    tokens = ids(text)
    slots = turn_slots(CONTROL, tokens, **options)
    marked = np.flatnonzero(slots.legal[:, CONTROL.names.index(token)])
    return [TOKENIZER.decode([tokens[at]]) for at in marked]


def decisions(text: str, **options: bool) -> list[str]:
    tokens = ids(text)
    return [TOKENIZER.decode([tokens[at]]) for at in np.flatnonzero(turn_slots(CONTROL, tokens, **options).decisions)]


def test_the_tokens_are_those_that_the_template_writes_and_the_parser_reads() -> None:
    assert set(CONTROL.names) == {
        "tool_call", "end_tool_call", "think", "end_think", "im_end", "im_start", "tool_response", "end_tool_response"
    }  # fmt: skip
    roles = (CONTROL.opens_call, CONTROL.closes_call, CONTROL.opens_thought, CONTROL.closes_thought, *CONTROL.ends)
    assert [CONTROL.names[role] for role in roles] == ["tool_call", "end_tool_call", "think", "end_think", "im_end"]
    assert CONTROL.in_call == CONTROL.in_text == ()


def test_tags_of_several_tokens_are_not_watched() -> None:
    parser = toolcalls.get("tagged")
    control = ControlTokens.of(TOKENIZER, ChatFormat(TOKENIZER, tools=TOOLS, parser=parser), parser)
    assert control.opens_call == control.closes_call == -1 and "im_end" in control.names


@pytest.mark.parametrize(
    ("template", "names", "inside", "in_text"),
    [
        ("qwen3", ("tool_call", "end_tool_call"), [], []),
        ("gemma4", ("tool_call", "end_tool_call"), ["token"], []),
        ("deepseekv3", ("tool_calls_begin", "tool_calls_end"), ["tool_call_begin", "tool_sep", "tool_call_end"], []),
        ("gptoss", ("", ""), [], ["channel", "message"]),
    ],
)
def test_roles_are_read_from_perfect_turns_of_any_template(template, names, inside, in_text) -> None:
    assert template in templates()
    control = ControlTokens.of(tokenizer_for(templates()[template]), format_of(template), HERMES)
    found = tuple(control.names[role] if role >= 0 else "" for role in (control.opens_call, control.closes_call))
    assert found == names and len(set(control.names)) == len(control.names)
    assert [control.names[role] for role in control.in_call] == inside
    assert [control.names[role] for role in control.in_text] == in_text


def test_a_call_may_open_where_the_turn_begins_and_on_a_new_line() -> None:
    assert legal(CALL + "<|im_end|>", "tool_call") == ["<tool_call>", "<|im_end|>"]
    spoken = legal("I add.\nThen it is 4<|im_end|>", "tool_call")
    assert len(spoken) == 2 and spoken[0].startswith("I") and spoken[1].startswith("T")
    assert legal(f"first {CALL}<|im_end|>", "tool_call")[1:] == [
        "<tool_call>",
        "<|im_end|>",
    ]  # a whole call in mid-line
    assert "<tool_call>" not in legal("it is <tool_call> 4<|im_end|>", "tool_call")


def test_a_call_closes_only_where_it_closed_and_held_something() -> None:
    assert legal(CALL + "<|im_end|>", "end_tool_call")[-1] == "</tool_call>"
    assert len(legal(CALL, "end_tool_call")) <= 2  # and on the whitespace before
    for broken in ("<tool_call></tool_call>", "<tool_call>\n</tool_call>", '<tool_call>{"name"', "4</tool_call>"):
        assert legal(broken, "end_tool_call") == [], broken


def test_a_turn_may_end_once_something_was_said_or_called() -> None:
    assert legal("<|im_end|>", "im_end") == []
    assert legal(CALL + "<|im_end|>", "im_end") == ["<|im_end|>"]
    assert legal("<think>\nhm\n</think>\n<|im_end|>", "im_end") == []
    words = ids("it is 4<|im_end|>")
    assert len(legal("it is 4<|im_end|>", "im_end")) == len(words) - 1


def test_thoughts_close_anywhere_and_nothing_else_stands_in_them() -> None:
    text = f"<think>\n{CALL}\n</think>\n4<|im_end|>"
    inside = len(ids(f"{CALL}\n")) + 2  # the newline before, and the closing tag itself
    assert len(legal(text, "end_think")) == inside
    assert legal(text, "think") == ["<think>", "\n", "4"]
    assert legal(text, "end_tool_call") == [] and "<tool_call>" not in legal(text, "tool_call")


def test_a_thought_that_the_prompt_opened_is_known_from_the_prompt() -> None:
    said = ids("hm\n</think>\n4<|im_end|>")
    places = {}
    for prompt in ("<|im_start|>assistant\n<think>\n", "<think>x</think><|im_start|>assistant\n"):
        before = ids(prompt)
        mask, turns = np.ones(len(said), dtype=bool), np.zeros(len(said), dtype=np.int32)
        found = sequence_slots(CONTROL, np.concatenate([before, said]), len(before), mask, turns)
        places[prompt.endswith("<think>\n")] = found.legal[0, CONTROL.closes_thought]
    assert places == {True: True, False: False}


def test_tokens_of_the_template_alone_are_legal_nowhere() -> None:
    for token in ("im_start", "tool_response", "end_tool_response"):
        assert legal(f"say {CALL} <|im_start|> 4<|im_end|>", token) == []


def test_decisions_are_beginnings_and_whole_calls() -> None:
    assert decisions(CALL + "<|im_end|>") == ["<tool_call>", "<|im_end|>"]
    assert decisions(f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>") == ["<think>", "<tool_call>", "<|im_end|>"]
    assert decisions("\n 4<|im_end|>")[0].strip() == "4"
    assert decisions(f"so {CALL}")[1:] == ["<tool_call>"] and len(decisions("so <tool_call> 4")) == 1
    assert decisions("hm</think>4", in_thought=True) == ["4"]


PIECES = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", "<|im_start|>", "\n", " ", "x", "12"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.lists(st.sampled_from(PIECES), max_size=14), st.booleans())
def test_slots_hold_for_any_turns_and_do_not_see_what_follows_or_tool_tokens(one, other, shown) -> None:
    first, second, tool = ids("".join(one)), ids("".join(other)), ids("<tool_response>4\n") if shown else ids("")
    prompt = ids("<|im_start|>assistant\n")
    parts = ((first, 0), (tool, -1), (second, 1))
    turns = np.concatenate([np.full(len(part), turn, dtype=np.int32) for part, turn in parts])
    tokens = np.concatenate([prompt, *(part for part, _ in parts)])
    found = sequence_slots(CONTROL, tokens, len(prompt), turns >= 0, turns)
    alone = [turn_slots(CONTROL, part) for part in (first, second)]
    if shown or not other or one[-1:] not in (["<think>"], ["\n"], [" "]):  # else the first turn is the second's prompt
        np.testing.assert_array_equal(found.legal, np.concatenate([each.legal for each in alone]))
        np.testing.assert_array_equal(found.decisions, np.concatenate([each.decisions for each in alone]))
    assert found.legal.shape == (len(first) + len(second), len(CONTROL.ids))
    never = [CONTROL.names.index(name) for name in ("im_start", "tool_response", "end_tool_response")]
    assert not found.legal[:, never].any()
