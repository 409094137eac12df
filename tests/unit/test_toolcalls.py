import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolrl import toolcalls
from toolrl.registry import UnknownName
from toolrl.toolcalls import Parser
from toolrl.trajectory import ToolCall

NAMES = ["hermes", "fenced", "tagged"]
# What a random text is made of, so that it comes close to calls.
PIECES = [
    *[
        "<tool_call>",
        "</tool_call>",
        "<python>",
        "</python>",
        "<\\/python>",
        "```python\n",
        "```",
        "\n```\n",
        "````python\n",
    ],
    *[
        "<think>",
        "</think>",
        "<tool_",
        "call>",
        "<|im_end|>",
        '{"name": "python", ',
        '"arguments": ',
        '{"code": "1"}',
        "}",
        "{",
    ],
    *[
        "[",
        "]",
        '"',
        "\\",
        "\\u12",
        "\\ud800",
        "null",
        "1e999",
        "NaN",
        "9" * 5000,
        "\n",
        " ",
        "x",
        "é",
        "\x00",
        "\ud800",
    ],
]
KINDS = {"bad_json", "not_an_object", "missing_name", "bad_arguments", "unclosed", "empty"}
STATES = {"healthy_call", "healthy_answer", "polluted", "collapsed"}

_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
_nasty = st.lists(st.one_of(st.sampled_from([p for p in PIECES if "\ud800" not in p]), _text)).map("".join)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _nasty,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_nasty, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("name", NAMES)
def test_ten_thousand_random_texts_give_calls_or_typed_errors(name: str):
    parser = toolcalls.get(name)
    choose = random.Random(0)
    for _ in range(10_000):
        text = "".join(choose.choices(PIECES, k=choose.randrange(14)))
        parsed = parser.parse(text)
        assert {error.kind for error in parsed.errors} <= KINDS
        assert [call.id for call in parsed.calls] == [f"call_{i}" for i in range(len(parsed.calls))]
        json.dumps([call.arguments for call in parsed.calls], allow_nan=False).encode()
        assert parser.format_state(text, "stop") in STATES
        if not parsed.calls and not parsed.errors:
            assert parsed.content == text


@given(
    st.lists(
        st.tuples(_nasty.filter(str.strip), st.dictionaries(_nasty, _json, max_size=3)),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=80, deadline=None)
def test_hermes_reads_back_any_call_it_writes(written):
    calls = [ToolCall(f"call_{i + 5}", name, arguments) for i, (name, arguments) in enumerate(written)]
    parser = toolcalls.get("hermes")
    text = parser.render(calls)
    parsed = parser.parse(f"Let me see.\n{text}<|im_end|>", first_call=5)
    assert parsed.calls == calls and not parsed.errors
    assert parsed.content.split() == ["Let", "me", "see.", "<|im_end|>"]
    assert parser.format_state(text + "<|im_end|>", "stop") == "healthy_call"


@pytest.mark.parametrize("name", ["fenced", "tagged"])
@given(codes=st.lists(_nasty.filter(str.strip), min_size=1, max_size=3))
@settings(max_examples=80, deadline=None)
def test_code_parsers_read_back_any_code_they_write(name, codes):
    calls = [ToolCall(f"call_{i}", "python", {"code": code}) for i, code in enumerate(codes)]
    parser = toolcalls.get(name)
    parsed = parser.parse(parser.render(calls))
    assert parsed.calls == calls and not parsed.errors and not parsed.content


@pytest.mark.parametrize("name", ["fenced", "tagged"])
def test_code_parsers_refuse_to_write_what_they_cannot_say(name: str):
    with pytest.raises(ValueError, match="can only call python"):
        toolcalls.get(name).render([ToolCall("call_0", "calculator", {"expression": "1"})])


def _hermes(payload: str) -> str:
    return f"<tool_call>\n{payload}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (_hermes('{"name": "python", "arguments": {"code": "1"'), "bad_json"),
        (_hermes("{'name': 'python'}"), "bad_json"),
        (_hermes('{"name": "python", "arguments": {"code": "a\nb"}}'), "bad_json"),  # a raw newline is not JSON
        (_hermes('{"name": "python", "arguments": {"x": NaN}}'), "bad_json"),
        (_hermes('{"name": "python", "arguments": {"x": 1e999}}'), "bad_json"),
        (_hermes('{"name": "python", "arguments": {}} and more'), "bad_json"),
        (_hermes("[" * 100_000), "bad_json"),
        (_hermes('["python"]'), "not_an_object"),
        (_hermes("1"), "not_an_object"),
        (_hermes('{"arguments": {}}'), "missing_name"),
        (_hermes('{"name": 3, "arguments": {}}'), "missing_name"),
        (_hermes('{"name": "python"}'), "bad_arguments"),
        (_hermes('{"name": "python", "arguments": "{}"}'), "bad_arguments"),
        (_hermes('{"name": "python", "arguments": [1]}'), "bad_arguments"),
        (_hermes(""), "empty"),
        ('<tool_call>\n{"name": "python", "argu', "unclosed"),
        ('<tool_call>\n{"name": "python", "arguments": {}}', "unclosed"),
        ("<tool_call>", "unclosed"),
    ],
)
def test_hermes_says_what_is_wrong_with_a_call(text: str, kind: str):
    parsed = toolcalls.get("hermes").parse(text)
    assert not parsed.calls
    assert [error.kind for error in parsed.errors] == [kind]
    assert parsed.errors[0].message and len(parsed.errors[0].message) < 200


def test_a_broken_call_does_not_hide_the_next_one():
    good = _hermes('{"name": "python", "arguments": {}}')
    for broken in (_hermes("{"), "<tool_call>{", _hermes("")):
        parsed = toolcalls.get("hermes").parse(broken + good)
        assert [call.name for call in parsed.calls] == ["python"]
        assert len(parsed.errors) == 1


def test_lone_surrogates_in_arguments_are_replaced():
    parsed = toolcalls.get("hermes").parse(
        _hermes('{"name": "python", "arguments": {"code": "\\ud800", "\\ud800": 1}}')
    )
    assert parsed.calls[0].arguments == {"code": "\ufffd", "\ufffd": 1}


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_call_is_reported_as_unclosed(name: str):
    parser = toolcalls.get(name)
    whole = parser.render([ToolCall("call_0", "python", {"code": "print(1)\nprint(2)"})])
    opened = whole.index("print")
    for end in range(opened, len(whole) - 1):
        parsed = parser.parse(whole[:end])
        assert not parsed.calls, whole[:end]
        assert parsed.unclosed, whole[:end]
        assert parser.format_state(whole[:end], "length") == "polluted"
        assert parser.format_state(whole[:end], "stop") == "collapsed"


@pytest.mark.parametrize("name", NAMES)
def test_a_thought_about_a_call_is_not_a_call(name: str):
    parser = toolcalls.get(name)
    call = parser.render([ToolCall("call_0", "python", {"code": "print(1)"})])
    for text in (f"<think>\n{call}\n</think>done", f"\n{call}\n</think>done"):
        assert parser.parse(text).calls == []
        assert parser.parse(text).content == text
        assert parser.format_state(text, "stop") == "healthy_answer"
    assert len(parser.parse(f"<think>\n{call}\n</think>\n{call}").calls) == 1
    assert len(parser.parse(f"<think>\n{call}").calls) == 1  # never closed: what it calls is called


@pytest.mark.parametrize("name", NAMES)
def test_text_without_a_call_is_untouched(name: str):
    for text in ("", "  plain text \n", "a < b and {x}", "<think>hm</think>\n\nyes<|im_end|>"):
        assert toolcalls.get(name).parse(text).content == text


def _states(parser: Parser, *texts: str) -> set[str]:
    return {parser.format_state(text, "stop") for text in texts}


def test_format_states_of_hermes():
    parser = toolcalls.get("hermes")
    call = _hermes('{"name": "python", "arguments": {"code": "</tool_call> <|im_start|>"}}')
    assert _states(parser, call, f"Look: {call}\n<|im_end|>", call + call) == {"healthy_call"}
    assert _states(parser, "42", "so \\boxed{1}<|im_end|>\n", "<think>x</think>y") == {"healthy_answer"}
    assert _states(parser, "</tool_call>", "<tool_call", "tool_call>x", call + "</tool_call>", "a<|im_start|>b") == {
        "polluted"
    }
    assert _states(parser, _hermes("{}"), _hermes("nothing")) == {"polluted"}
    assert _states(parser, "", " \n", "<|im_end|>", "<|im_end|>\n<|endoftext|>", _hermes(" "), "<tool_call>{") == {
        "collapsed"
    }
    assert _states(parser, call + _hermes("")) == {"collapsed"}


def test_format_states_of_code_parsers():
    fenced, tagged = toolcalls.get("fenced"), toolcalls.get("tagged")
    assert _states(fenced, "```python\n1\n```", "so\n```python\n1\n```<|im_end|>") == {"healthy_call"}
    assert _states(fenced, "```text\nx\n```", "it is `python`") == {"healthy_answer"}
    assert _states(fenced, "```python\n\n```", "```python\n1") == {"collapsed"}
    assert _states(tagged, "<python>1</python>") == {"healthy_call"}
    assert _states(tagged, "</python>", "<python", "python> x") == {"polluted"}
    assert _states(tagged, "<python></python>", "<python>1") == {"collapsed"}


def test_fences_close_as_in_markdown():
    parse = toolcalls.get("fenced").parse
    assert parse("```py\nx = '```'\n```").calls[0].arguments == {"code": "x = '```'"}
    assert parse("````python\na\n```\nb\n````").calls[0].arguments == {"code": "a\n```\nb"}
    assert len(parse("```python\n1\n```\nand\n```python\n2\n```").calls) == 2
    assert parse("```pythonic\n1\n```").calls == []


def test_an_unknown_parser_is_named_with_the_nearest_one():
    with pytest.raises(UnknownName, match="hermes"):
        toolcalls.get("hermse")


def test_an_external_parser_is_asked_for_by_its_prefix():
    assert toolcalls.get("vllm:some", external=lambda name: toolcalls.get({"some": "tagged"}[name])).name == "tagged"
    with pytest.raises(ValueError, match="needs vLLM"):
        toolcalls.get("vllm:some")


@pytest.mark.parametrize("name", NAMES)
def test_long_hostile_texts_are_read_in_time(name: str):
    parser = toolcalls.get(name)
    start = time.monotonic()
    for piece in (
        "<tool_call>",
        "<tool_call>{",
        "</tool_call>",
        "<python>",
        "</python>",
        "```python\n",
        "<think>",
        "</think>",
    ):
        parser.parse(piece * 5_000)
        parser.format_state((piece + " ") * 5_000, "stop")
    assert time.monotonic() - start < 5
