"""A chat template and the dialect in which it wants to be spoken to.

Canonical messages are OpenAI's: `system`, `user`, `assistant` (`content`, `reasoning_content`, `tool_calls` with
arguments as an object) and `tool` (`tool_call_id`, `name`, `content`). Templates differ in what they accept;
`Dialect` says how, `Template` translates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolrl.errors import UserError
from toolrl.trajectory import ToolCall

ToolSchema = dict[str, Any]
Message = dict[str, Any]


class TemplateRefused(UserError):
    """A chat template that cannot be continued token by token; the message says what it rewrites or leaves out."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a template takes messages."""

    content: Literal["string", "parts"] = "string"
    system: Literal["native", "in_user"] = "native"
    calls: Literal["native", "text"] = "native"  # text: written into the content, as the parser writes them
    arguments: Literal["object", "json"] = "object"
    results: Literal["tool", "user"] = "tool"  # user: shown as one user message
    thinking: Literal["reasoning_content", "thinking", "reasoning", "inline"] = "inline"
    parallel: bool = True  # several calls in one message
    text_beside_calls: bool = True  # content and calls in one message
    call_ids: Literal["ours", "nine"] = "ours"  # nine: nine letters and digits (Mistral)
    thought: str = "<think>\n{}\n</think>\n\n"  # how a turn's content holds its thinking, for `inline`
    tools: Literal["template", "described"] = "template"  # described: put into the system message by us


class Template:
    """Renders canonical messages to text with a tokenizer's (or a given) chat template."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[ToolSchema] = (),
        chat_template: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if chat_template is not None and "{" not in chat_template:
            if not Path(chat_template).is_file():
                raise TemplateRefused(f"model.chat_template: there is no file {chat_template}")
            chat_template = Path(chat_template).read_text()
        if chat_template is None and not tokenizer.chat_template:
            raise TemplateRefused("the tokenizer has no chat template: name a Jinja file in model.chat_template")
        self._tokenizer = tokenizer
        self._template = chat_template
        self._options = dict(options or {})
        self.source = str(chat_template or tokenizer.get_chat_template(tools=list(tools) or None))
        self.tools = list(tools)

    def render(self, messages: Sequence[Message], dialect: Dialect, *, generation: bool) -> str:
        """The text of a conversation. Raises whatever the template raises."""
        text = self._tokenizer.apply_chat_template(
            _translated(messages, dialect),
            tools=self.tools if self.tools and dialect.tools == "template" else None,
            chat_template=self._template,
            add_generation_prompt=generation,
            tokenize=False,
            **self._options,
        )
        assert isinstance(text, str)
        return text


def assistant_message(content: str, calls: Sequence[ToolCall] = (), reasoning: str = "") -> Message:
    """A canonical assistant message."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def tool_message(call_id: str, name: str, text: str) -> Message:
    """A canonical tool message."""
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": text}


def as_user_text(message: Message) -> str:
    """A tool message as a user message shows it."""
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _translated(messages: Sequence[Message], dialect: Dialect) -> list[Message]:
    """The messages in the dialect."""
    spoken: list[Message] = []
    for message in messages:
        role = message["role"]
        if role == "assistant":
            spoken.append(_assistant(message, dialect))
        elif role == "tool" and dialect.results == "user":
            result = as_user_text(message)
            if spoken and spoken[-1].get("results"):
                spoken[-1]["content"] += "\n" + result
            else:
                spoken.append({"role": "user", "content": result, "results": True})
        else:
            spoken.append(dict(message))
            if role == "tool":
                spoken[-1]["tool_call_id"] = _id(message["tool_call_id"], dialect)
    if dialect.system == "in_user" and spoken and spoken[0]["role"] == "system":
        system = spoken.pop(0)
        if not spoken or spoken[0]["role"] != "user":
            spoken.insert(0, {"role": "user", "content": system["content"]})
        else:
            spoken[0]["content"] = f"{system['content']}\n\n{spoken[0]['content']}"
    for message in spoken:
        message.pop("results", None)
        if dialect.content == "parts" and isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return spoken


def _assistant(message: Message, dialect: Dialect) -> Message:
    spoken = dict(message)
    reasoning = spoken.pop("reasoning_content", "")
    if reasoning and dialect.thinking == "inline":
        spoken["content"] = dialect.thought.format(reasoning) + spoken["content"]
    elif reasoning:
        spoken[dialect.thinking] = reasoning
    if "tool_calls" in spoken:
        if dialect.calls == "text":
            raise ValueError("this dialect has no tool calls: write them into the content")
        spoken["tool_calls"] = [_call(call, dialect) for call in spoken["tool_calls"]]
    return spoken


def _call(call: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    function = dict(call["function"])
    if dialect.arguments == "json":
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "id": _id(call["id"], dialect), "function": function}


def _id(call_id: str, dialect: Dialect) -> str:
    """The call's id as the template takes it; distinct ids stay distinct."""
    if dialect.call_ids == "ours":
        return call_id
    number = call_id.removeprefix("call_")
    if number.isdecimal() and len(number) <= 5:
        return f"call{number:0>5}"
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]
