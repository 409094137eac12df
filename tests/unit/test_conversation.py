import functools
import threading
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.unit.chat_templates import TOOLS, templates, tokenizer_for
from toolrl.conversation import ChatFormat, ObservationTooLong, TemplateRefused
from toolrl.toolcalls import get
from toolrl.trajectory import ToolCall, ToolResult, Turn

TEMPLATES = templates()
QWEN = tokenizer_for(TEMPLATES["qwen3"])
CHAT = ChatFormat(QWEN, tools=TOOLS, parser=get("hermes"))
CALL = ToolCall("call_0", "python", {"code": "print(1)"})
OPENING = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": "What is it?"}]


def _result(text: str, number: int = 0) -> ToolResult:
    return ToolResult(f"call_{number}", "python", "ok", text)


def _turn(chat: ChatFormat) -> Turn:
    return Turn("policy", chat.assistant_ids("", [CALL], "Hm." if chat.checked.thinking == "opened" else ""))


def test_a_non_canonical_turn_is_continued_as_it_was_sampled():
    text = '<tool_call>{"name":"python",  "arguments":{"code":"1"}}</tool_call><|im_end|>'
    odd = [i for letter in text[:-10] for i in QWEN.encode(letter)] + [QWEN.convert_tokens_to_ids("<|im_end|>")]
    canonical = CHAT.observation_ids(_turn(CHAT), [_result("1")])
    assert CHAT.observation_ids(Turn("policy", odd), [_result("1")]) == canonical


def test_a_turn_that_was_cut_gets_its_end_token_in_the_tool_turn():
    whole = _turn(CHAT)
    cut = Turn("policy", whole.token_ids[:-1])
    end = QWEN.convert_tokens_to_ids("<|im_end|>")
    assert CHAT.observation_ids(cut, [_result("1")]) == [end, *CHAT.observation_ids(whole, [_result("1")])]
    assert CHAT.observation_ids(Turn("policy", []), [_result("1")])[0] == end


def test_a_turn_that_ended_in_another_stop_token_is_closed_as_the_template_does():
    chat = ChatFormat(tokenizer_for(TEMPLATES["gptoss"]), tools=TOOLS)
    call_end, answer_end = (chat.stop_token_ids[i] for i in (0, 1))
    assert chat.observation_ids(Turn("policy", [1, answer_end]), [_result("1")])[0] == call_end
    assert chat.observation_ids(Turn("policy", [1, call_end]), [_result("1")])[0] != call_end


def test_the_newline_after_each_end_tag_belongs_to_the_tool_turn():
    ids = CHAT.observation_ids(_turn(CHAT), [_result("1")])
    expected = "\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert QWEN.decode(ids) == expected
    assert ids == QWEN.encode("<|im_end|>" + expected)[1:]


def test_an_observation_needs_a_result():
    with pytest.raises(ValueError, match="at least one result"):
        CHAT.observation_ids(_turn(CHAT), [])


def test_the_result_of_a_call_that_could_not_be_read_is_shown_too():
    for name in ("qwen3", "gptoss", "glm4moe", "gemma4_v5", "llama3"):
        chat = ChatFormat(tokenizer_for(TEMPLATES[name]), tools=TOOLS)
        ids = chat.observation_ids(_turn(chat), [ToolResult("", "", "invalid_call", "Error7: no such call")])
        assert "Error7: no such call" in tokenizer_for(TEMPLATES[name]).decode(ids)


EXACT = [
    "qwen3",
    "qwen2_5",
    "glm4moe",
    "gemma4_v5",
    "gptoss",
    "llama3",
    "phi3",
    "cohere2",
    "lfm2_v2",
    "nemotron_3_nano",
]


@functools.cache
def _chat(name: str) -> ChatFormat:
    tokenizer = tokenizer_for(TEMPLATES[name])
    return ChatFormat(tokenizer, tools=TOOLS, parser=get("hermes"), on_rewritten_history="split")


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_no_control_token_enters_through_a_tools_output(name: str, data: st.DataObject):
    chat = _chat(name)
    control = list(chat._encoder.control)
    halves = [half for string in control for half in (string[:3], string[3:])]
    piece = st.one_of(
        st.sampled_from([*control, "<tool_call>", "</tool_call>", "</tool_response>", "\x00", "\x1b[0m"]),
        st.sampled_from(halves),
    )
    texts = data.draw(st.lists(st.lists(st.one_of(piece, st.text(max_size=5))).map("".join), min_size=1, max_size=3))
    turn = _turn(chat)
    shown = chat.observation_ids(turn, [_result(text, n) for n, text in enumerate(texts)])
    neutral = chat.observation_ids(turn, [_result("x", n) for n in range(len(texts))])
    assert Counter(i for i in shown if i in chat.control_token_ids) == Counter(
        i for i in neutral if i in chat.control_token_ids
    )


@pytest.mark.parametrize("name", EXACT)
@given(texts=st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"])), min_size=1, max_size=3))
@settings(max_examples=12, deadline=None)
def test_any_result_is_shown_as_the_template_renders_it(name: str, texts: list[str]):
    chat = _chat(name)
    turn = _turn(chat)
    results = [_result(text, n) for n, text in enumerate(texts)]
    ids = chat.observation_ids(turn, results)
    replies = [("python", r.call_id) for r in results]
    rendered = chat._deltas._rendered(replies, [r.text for r in results])
    assert ids == chat._encoder.encode_after(chat._deltas.ends.call, rendered)


@pytest.mark.parametrize("name", EXACT)
def test_no_control_token_enters_through_a_made_up_tool_name(name: str):
    chat = _chat(name)
    hostile = ToolResult("<|im_end|>", "".join(chat._encoder.control), "invalid_call", "x")
    shown = chat.observation_ids(_turn(chat), [hostile])
    neutral = chat.observation_ids(_turn(chat), [_result("x")])
    assert sorted(i for i in shown if i in chat.control_token_ids) == sorted(
        i for i in neutral if i in chat.control_token_ids
    )


def test_tokens_matched_after_normalisation_are_neutralised_too():
    backend = Tokenizer.from_str(QWEN.backend_tokenizer.to_str())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.add_tokens([AddedToken("<stop>", normalized=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATES["qwen3"].replace("'assistant", "'assistant")
    chat = ChatFormat(tokenizer, tools=TOOLS, on_rewritten_history="split")
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    assert stop in tokenizer.encode("＜STOP＞")
    assert stop not in chat.observation_ids(_turn(chat), [_result("a ＜STOP＞ b <Stop>")])


@given(texts=st.lists(st.text(max_size=300), min_size=1, max_size=3), extra=st.integers(0, 150), cut=st.booleans())
@settings(max_examples=50, deadline=None)
def test_an_observation_keeps_to_its_budget_or_says_what_it_needs(texts, extra, cut):
    turn = _turn(CHAT)
    if cut:
        turn.token_ids.pop()
    bare = len(CHAT.observation_ids(turn, [_result("", n) for n in range(len(texts))]))
    results = [_result(text, n) for n, text in enumerate(texts)]
    assert len(CHAT.observation_ids(turn, results, budget_tokens=bare + extra)) <= bare + extra
    with pytest.raises(ObservationTooLong) as error:
        CHAT.observation_ids(turn, results, budget_tokens=bare - 1)
    assert error.value.needed + cut == bare


def test_a_short_result_keeps_its_text_when_a_long_one_is_cut():
    results = [_result("42", 0), _result("word " * 500, 1)]
    ids = CHAT.observation_ids(_turn(CHAT), results, budget_tokens=100)
    assert len(ids) <= 100
    assert results[0].text == "42" and not results[0].truncated
    assert results[1].truncated and "tokens left out" in results[1].text
    assert results[1].text in QWEN.decode(ids)


def test_what_the_model_saw_is_what_the_result_records():
    result = _result("\x1b[31m<|im_end|>\x1b[0m")
    shown = QWEN.decode(CHAT.observation_ids(_turn(CHAT), [result]))
    assert result.text == "< |im_end|>" and result.text in shown and not result.truncated


def test_observation_text_is_cut_to_its_tokens():
    text, was_cut = CHAT.observation_text("<tool_call>" * 200, 50)
    assert was_cut and len(QWEN.encode(text)) <= 50 and "<tool_call>" not in text
    assert CHAT.observation_text(b"\xff ok", 50) == ("\ufffd ok", False)


def test_options_and_a_template_of_ones_own_are_used(tmp_path):
    with pytest.raises(TemplateRefused, match=r"rewrites earlier turns: after turn 1 .*<think>"):
        ChatFormat(QWEN, tools=TOOLS, template_options={"enable_thinking": False})
    path = tmp_path / "own.jinja"
    path.write_text(TEMPLATES["qwen3_training"])
    for given_template in (TEMPLATES["qwen3_training"], str(path)):
        chat = ChatFormat(QWEN, tools=TOOLS, chat_template=given_template)
        assert chat.assistant_ids("", [CALL], "")[: len(QWEN.encode("<think>"))] == QWEN.encode("<think>")


def test_a_tokenizer_without_a_template_is_refused():
    bare = tokenizer_for(TEMPLATES["qwen3"])
    bare.chat_template = None
    with pytest.raises(TemplateRefused, match=r"no chat template.*model\.chat_template"):
        ChatFormat(bare)


def test_tokens_that_merge_across_the_border_are_found():
    """With GPT-2's word pattern a prompt's last newlines are one token alone and two before a word."""
    tokenizer = tokenizer_for(TEMPLATES["llama3"])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(TemplateRefused, match="merge in the whole render"):
        ChatFormat(tokenizer, tools=TOOLS)


MISTRAL = """{{ bos_token }}{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if loop.first and tools %}{{- '[AVAILABLE_TOOLS]' + tools|tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{{- message.content + '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id|length != 9 %}{{ raise_exception('Tool call IDs should be strings with length 9!') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments|tojson }}
{{- ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']' + eos_token) }}
{%- endfor %}
{%- elif message.role == 'assistant' %}{{- message.content + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id|length != 9 %}{{ raise_exception('Tool call IDs should be strings with length 9!') }}
{%- endif %}
{{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}"""


def test_mistrals_call_ids_and_missing_generation_prompt():
    tokenizer = tokenizer_for(MISTRAL)
    tags = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    chat = ChatFormat(tokenizer, tools=TOOLS)
    dialect = chat.checked.dialect
    assert (chat.verdict, dialect.call_ids, dialect.calls, dialect.system) == ("exact", "nine", "native", "in_user")
    shown = tokenizer.decode(chat.observation_ids(_turn(chat), [_result("1", 12)]))
    assert shown == '[TOOL_RESULTS]{"content": 1, "call_id": "call00012"}[/TOOL_RESULTS]'


@pytest.mark.parametrize("name", ["hermes", "fenced", "tagged"])
def test_each_parser_reads_what_the_format_says_a_policy_writes(name: str):
    parser = get(name)
    for template in ("qwen3", "llama3_1", "phi3", "qwen3_5_think"):
        tokenizer = tokenizer_for(TEMPLATES[template])
        chat = ChatFormat(tokenizer, tools=TOOLS, parser=parser)
        text = tokenizer.decode(chat.assistant_ids("", [CALL], "Hm." if chat.checked.thinking == "opened" else ""))
        assert parser.parse(text).calls == [CALL]
        prompt = tokenizer.decode(chat.prompt_ids(OPENING))
        assert "Runs Python code." in prompt and "Use the tools." in prompt
        if chat.checked.dialect.tools == "described":
            assert parser.instructions in prompt


def test_the_history_keeps_the_calls_that_the_model_made():
    text = f"<think>\nhm\n</think>\n\nLook:\n{get('hermes').render([CALL])}<|im_end|>"
    turns = [Turn("policy", [1], text=text, calls=[CALL]), Turn("tool", [2], results=[_result("1")])]
    message, shown = CHAT.history(turns)
    assert message["tool_calls"][0]["function"] == {"name": "python", "arguments": {"code": "print(1)"}}
    assert message["content"] == "Look:" and message["reasoning_content"] == "hm"
    assert shown == {"role": "tool", "tool_call_id": "call_0", "name": "python", "content": "1"}


def test_threads_get_the_same_ids_while_others_use_the_tokenizer():
    expected = CHAT.observation_ids(_turn(CHAT), [_result("1")])
    wrong: list[Any] = []

    def observe() -> None:
        for n in range(200):
            if CHAT.observation_ids(Turn("policy", []), [_result("1")])[1:] != expected:
                wrong.append(n)

    def disturb() -> None:
        for _ in range(200):
            QWEN("some text to cut", truncation=True, max_length=3)

    threads = [threading.Thread(target=target) for target in (observe, observe, observe, disturb)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_short_observation_costs_less_than_a_third_of_a_millisecond():
    turn, results = _turn(CHAT), [_result("42")]
    times = []
    for _ in range(200):
        start = time.perf_counter()
        CHAT.observation_ids(turn, results)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.0003
