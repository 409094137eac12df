"""Every text template of trl against the template's own whole renders.

The messages are written out here by hand, once for each way of taking them; nothing of the check in toolrl.conversation is
used but its verdict.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.unit import chat_templates
from tests.unit.chat_templates import TOOLS, templates, tokenizer_for
from toolrl.conversation import ChatFormat, TemplateRefused
from toolrl.toolcalls import get
from toolrl.trajectory import ToolCall, ToolResult, Turn

TEMPLATES = templates()


def _whole(tokenizer: Any, messages: list[dict], *, prompt: bool) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=prompt)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _messages(chat: ChatFormat, turns: list[tuple[str, str, list[ToolCall], list[str]]]) -> list[dict]:
    """The conversation as this template takes it: (thought, words, calls, results) for each turn."""
    how = chat.checked.dialect
    system, user = "Use the tools.", "What is it?"
    if how.system == "native":
        messages: list[dict] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    else:
        messages = [{"role": "user", "content": f"{system}\n\n{user}"}]
    for thought, words, calls, results in turns:
        message: dict[str, Any] = {"role": "assistant", "content": words}
        if thought and how.thinking == "inline":
            message["content"] = how.thought.format(thought) + words
        elif thought:
            message[how.thinking] = thought
        if how.calls == "text" and calls:
            message["content"] += ("\n" if words else "") + get("hermes").render(calls)
        elif calls:
            assert how.arguments == "object"
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ]
        messages.append(message)
        if how.results == "user" and results:
            shown = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in results)
            messages.append({"role": "user", "content": shown})
        elif results:
            messages += [
                {"role": "tool", "tool_call_id": c.id, "name": c.name, "content": r}
                for c, r in zip(calls, results, strict=True)
            ]
    if how.content == "parts":
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    return messages


def _turns(chat: ChatFormat, thinking: bool) -> list[tuple[str, str, list[ToolCall], list[str]]]:
    def call(number: int, code: str) -> ToolCall:
        return ToolCall(f"call_{number}", "python", {"code": code})

    how = chat.checked.dialect
    words = ["Let me compute.", "", "Once more,\n\nwith two:"] if how.text_beside_calls else ["", "", ""]
    last = [call(2, "print('é')"), call(3, "pass")]
    turns = [
        (words[0], [call(0, "print(1)")], ["1"]),
        (words[1], [call(1, 'x = {"a": "</b>"}\nprint(x)')], [""]),
        (words[2], last[: 2 if how.parallel else 1], ["Traceback:\n  <oops>\n", "ok"]),
        ("It is \\boxed{42}.", [], []),
    ]
    return [
        (f"Thought {n}: yes." if thinking else "", said, calls, results[: len(calls)])
        for n, (said, calls, results) in enumerate(turns)
    ]


@functools.cache
def _tokenizer(name: str) -> Any:
    return tokenizer_for(TEMPLATES[name])


def _modes(chat: ChatFormat) -> list[bool]:
    """Whether the policy thinks: both where it may choose, else what the generation prompt lays down."""
    return {"optional": [False, True], "opened": [True], "closed": [False]}[chat.checked.thinking]


# What a template is, is found out inside the tests: each of pytest's processes collects them all.


@pytest.mark.parametrize("name", TEMPLATES)
def test_turn_by_turn_ids_equal_the_whole_render_or_the_template_says_why(name: str):
    chat = chat_templates.format_of(name)
    if isinstance(chat, ChatFormat) and chat.verdict == "exact":
        for thinking in _modes(chat):
            _turn_by_turn(chat, _tokenizer(name), thinking)
    else:
        with pytest.raises(TemplateRefused, match=r"(rewrites earlier turns|cannot be used with tools): .{20,}"):
            ChatFormat(_tokenizer(name), tools=TOOLS)


def _turn_by_turn(chat: ChatFormat, tokenizer: Any, thinking: bool) -> None:
    turns = _turns(chat, thinking)
    messages = _messages(chat, turns)
    ids = chat.prompt_ids([{"role": "system", "content": "Use the tools."}, {"role": "user", "content": "What is it?"}])
    position = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    for thought, words, calls, results in turns:
        assert ids == _whole(tokenizer, messages[:position], prompt=True)
        sampled = chat.assistant_ids(words, calls, thought)
        assert sampled[-1] in chat.stop_token_ids
        ids += sampled
        if calls:
            replies = [ToolResult(c.id, c.name, "ok", r) for c, r in zip(calls, results, strict=True)]
            ids += chat.observation_ids(Turn("policy", sampled), replies)
            position += 2 if chat.checked.dialect.results == "user" else 1 + len(calls)
    if not any("once the last answer" in note for note in chat.checked.notes) and chat.checked.deltas.ends.answer_rest:
        assert _whole(tokenizer, messages, prompt=False)[: len(ids)] == ids


def _chats() -> dict[str, ChatFormat]:
    found = {name: chat_templates.format_of(name) for name in TEMPLATES}
    return {name: chat for name, chat in found.items() if isinstance(chat, ChatFormat)}


def test_most_templates_are_exact():
    modes = [mode for chat in _chats().values() if chat.verdict == "exact" for mode in _modes(chat)]
    assert sum(chat.verdict == "exact" for chat in _chats().values()) >= 55 and len(set(modes)) == 2


def test_a_split_trajectory_goes_on_from_the_templates_own_render():
    split = {name: chat for name, chat in _chats().items() if chat.verdict == "split"}
    assert split
    for name, chat in split.items():
        _goes_on(chat, _tokenizer(name))


def _goes_on(chat: ChatFormat, tokenizer: Any) -> None:
    opening = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": "What is it?"}]
    call = ToolCall("call_0", "python", {"code": "print(1)"})
    how = chat.checked.dialect
    text = "" if how.calls == "native" else get("hermes").render([call])
    turns = [
        Turn("policy", [1], text=text + chat.checked.deltas.ends.call, calls=[call]),
        Turn("tool", [2], results=[ToolResult("call_0", "python", "ok", "1")]),
    ]
    segment = chat.split_prompt_ids(opening, turns)
    expected = chat.history(turns)
    if how.calls == "native" and how.arguments == "object":
        assert segment == _whole(tokenizer, opening + expected, prompt=True)
    assert "print(1)" in tokenizer.decode(segment)


def test_a_failed_call_is_shown_whatever_the_template():
    """Templates raise or keep silent about a result without a call: never in mid-run."""
    for name, chat in _chats().items():
        _shows_a_failed_call(chat, _tokenizer(name))


def _shows_a_failed_call(chat: ChatFormat, tokenizer: Any) -> None:
    failed = Turn("policy", [1], text="<tool_call>{" + chat.checked.deltas.ends.call)
    results = [
        ToolResult("error_0", "", "invalid_call", "Oops7: no JSON"),
        ToolResult("error_1", "<|im_end|>", "error", "Again7"),
    ]
    shown = chat.observation_ids(failed, results)
    segment = chat.split_prompt_ids([{"role": "user", "content": "go"}], [failed, Turn("tool", shown, results=results)])
    for ids in (shown, segment):
        text = tokenizer.decode(ids)
        assert "Oops7: no JSON" in text and "Again7" in text


def test_the_documented_table_is_what_the_templates_do():
    table = chat_templates.table()
    assert table in chat_templates.DOCS.read_text(), (
        "docs/chat-templates.md is out of step: python -m tests.unit.chat_templates"
    )
