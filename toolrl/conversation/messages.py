"""What is done to messages that a template would not take or show as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from toolrl.conversation.template import (
    Dialect,
    Message,
    Template,
    ToolSchema,
    as_user_text,
    assistant_message,
    tool_message,
)
from toolrl.conversation.text import clean_text


def word(name: str) -> str:
    """A tool's name or a call's id as a template may write it: the policy made it up, it may be anything."""
    return re.sub(r"[^\w.-]+", "_", clean_text(name))[:64] or "tool"


def shows_results_without_calls(template: Template, dialect: Dialect) -> bool:
    """Whether the template shows a tool message after a turn without calls (one whose call could not be read)."""
    failed = [{"role": "user", "content": "go"}, assistant_message("oops"), tool_message("error_0", "tool", "Got0Q")]
    try:
        return "Got0Q" in template.render(failed, dialect, generation=True)
    except Exception:  # whatever a template raises is its way of saying no
        return False


def with_results_of_failed_calls_as_user(messages: Sequence[Message]) -> list[Message]:
    """The messages, with results that follow a turn without calls in a user message."""
    shown: list[Message] = []
    called = True
    for message in messages:
        if message["role"] != "tool":
            called = "tool_calls" in message
            shown.append(message)
        elif called:
            shown.append(message)
        elif shown[-1]["role"] == "user":
            shown[-1] = {"role": "user", "content": shown[-1]["content"] + "\n" + as_user_text(message)}
        else:
            shown.append({"role": "user", "content": as_user_text(message)})
    return shown


def with_tools(messages: Sequence[Message], tools: Sequence[ToolSchema], instructions: str) -> list[Message]:
    """The messages with the tools described in the system message, for templates that do not."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    described = f"You can call these tools:\n{listed}\n{instructions}"
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{described}"}, *messages[1:]]
    return [{"role": "system", "content": described}, *messages]
