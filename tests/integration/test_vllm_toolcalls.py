"""Every tool-call parser of the installed vLLM behind our interface: total over hostile text, and right on its own format."""

from __future__ import annotations

import json
import random

import pytest

from tests.requirements import need

need("vllm", "trl")

from actors.vllm_toolcalls import ParserUnavailable, VllmParser, names, vllm_parser_factory
from tests.unit.chat_templates import TOOLS, templates, tokenizer_for
from toolrl import toolcalls
from toolrl.conversation import ChatFormat
from toolrl.registry import UnknownName
from toolrl.trajectory import ToolCall

# Tokens that some parsers want to find in the vocabulary before they start.
WANTED = [
    *[
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ],
    *["<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<|tool_calls|>", "</|tool_calls|>"],
    *["<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    *["<tool_sep>", "</tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>"],
]
# These read token ids (Harmony), a library of their own (Cohere) or a response template that the tokenizer must bring.
NOT_ON_TEXT = {"openai", "cohere_command3", "cohere_command4", "hf"}
PIECES = [
    *WANTED,
    *list("{}[]()\"',:=/\\|<>1# \n\x00é\ud800"),
    *["python", "code", "name", "arguments", "parameters", "null", "true", "NaN", "print(1)", "```json", "```"],
    *[
        '{"name": "python", "arguments": {"code": "print(1)"}}',
        '[python(code="1")]',
        "<|im_end|>",
        "[" * 50,
        "9" * 5000,
    ],
    *[
        "<function=python>",
        "<parameter=code>",
        "</parameter>",
        "</function>",
        "functools",
        "<|action_start|>",
        "<|plugin|>",
    ],
    *[
        '<invoke name="python">',
        '<parameter name="code">',
        "</invoke>",
        "<minimax:tool_call>",
        "<|tool_calls_section_begin|>",
    ],
    *["<|tool_call>", "<tool_call|>", '<|"|>', "<seed:tool_call>", "</seed:tool_call>", "call:"],
]


@pytest.fixture(scope="module")
def tokenizer():
    made = tokenizer_for(templates()["qwen3"])
    made.add_special_tokens({"additional_special_tokens": WANTED})
    return made


def _texts(count: int, seed: int, own: list[str]) -> list[str]:
    choose = random.Random(seed)
    return ["".join(choose.choices(PIECES + own * 8, k=choose.randrange(1, 16))) for _ in range(count)]


def test_every_parser_is_total(tokenizer):
    usable = 0
    for name in names():
        try:
            parser = toolcalls.get(f"vllm:{name}", external=vllm_parser_factory(tokenizer, TOOLS))
        except ParserUnavailable as error:
            assert name in NOT_ON_TEXT, error
            continue
        usable += 1
        for text in ["", "plain text", *_texts(60, 0, list(parser.tags))]:
            parsed = parser.parse(text)
            assert [call.id for call in parsed.calls] == [f"call_{i}" for i in range(len(parsed.calls))]
            json.dumps([call.arguments for call in parsed.calls], allow_nan=False).encode()
            assert parser.format_state(text, "stop") in {"healthy_call", "healthy_answer", "polluted", "collapsed"}
        assert parser.parse("plain text") == toolcalls.Parsed("plain text")
    assert usable == len(names()) - len(NOT_ON_TEXT)


# A chat template in its own format, and vLLM's parser for it.
PAIRS = {
    "qwen3": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "glm4moe": "glm45",
    "lfm2_v2": "lfm2",
    "gemma4_v5": "gemma4",
    "muse_glimmer": "muse_glimmer",
    "nemotron_3_nano": "qwen3_coder",
}


@pytest.mark.parametrize("template", PAIRS)
def test_a_parser_reads_what_its_models_chat_template_writes(template: str):
    tokenizer = tokenizer_for(templates()[template])
    parser = VllmParser(PAIRS[template], tokenizer, TOOLS)
    chat = ChatFormat(tokenizer, tools=TOOLS, parser=parser)
    assert chat.checked.dialect.calls == "native" and chat.verdict == "exact"
    calls = [ToolCall("call_3", "python", {"code": "print({'a': 1})\nprint('</b>')"})]
    reasoning = "Hm." if chat.checked.thinking == "opened" else ""
    text = tokenizer.decode(chat.assistant_ids("", calls, reasoning))
    assert parser.parse(text, first_call=3).calls == calls
    assert parser.format_state(text, "stop") == "healthy_call"


@pytest.mark.parametrize("template", PAIRS)
def test_a_call_that_is_cut_off_is_never_made_with_what_is_there(template: str):
    tokenizer = tokenizer_for(templates()[template])
    parser = VllmParser(PAIRS[template], tokenizer, TOOLS)
    chat = ChatFormat(tokenizer, tools=TOOLS, parser=parser)
    calls = [ToolCall("call_0", "python", {"code": "print(1)\nx"})]
    text = tokenizer.decode(chat.assistant_ids("", calls, "Hm." if chat.checked.thinking == "opened" else ""))
    for end in range(text.index("print"), text.index("x") + 1):
        parsed = parser.parse(text[:end])
        assert not parsed.calls and parsed.errors, text[:end]
    for end in range(text.index("x") + 1, len(text)):
        assert parser.parse(text[:end]).calls in ([], calls), text[:end]


def test_a_truncated_call_is_no_call(tokenizer):
    parser = VllmParser("hermes", tokenizer, TOOLS)
    whole = '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'
    for end in range(12, len(whole) - 13):
        parsed = parser.parse(whole[:end])
        assert not parsed.calls and parsed.unclosed, whole[:end]


def test_a_thought_about_a_call_is_not_a_call(tokenizer):
    parser = VllmParser("hermes", tokenizer, TOOLS)
    call = '<tool_call>\n{"name": "python", "arguments": {}}\n</tool_call>'
    assert parser.parse(f"<think>{call}</think>no").calls == []
    assert len(parser.parse(f"<think>{call}</think>{call}").calls) == 1


def test_an_unknown_parser_is_named_with_the_nearest_one(tokenizer):
    with pytest.raises(UnknownName, match="hermes"):
        toolcalls.get("vllm:hermse", external=vllm_parser_factory(tokenizer))


def test_a_tokenizer_that_a_parser_cannot_work_with_is_refused_at_once():
    with pytest.raises(ParserUnavailable, match=r"deepseek_v3.*tokenizer"):
        VllmParser("deepseek_v3", tokenizer_for(templates()["qwen3"]), TOOLS)


def test_writing_a_call_is_left_to_the_chat_template(tokenizer):
    with pytest.raises(ValueError, match="reads calls only"):
        VllmParser("hermes", tokenizer).render([])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "gemma4", "kimi_k2"])
def test_a_turn_is_read_the_same_after_any_other(name: str, tokenizer):
    parser, texts = VllmParser(name, tokenizer, TOOLS), _texts(60, 2, ["<tool_call>", "<function=python>"])
    before = [parser.parse(text) for text in texts]
    assert [parser.parse(text) for text in reversed(texts)] == before[::-1]
