"""`hermes`: a JSON object with `name` and `arguments` inside `<tool_call>` tags (Qwen, Hermes and many others).

The JSON decides where a call ends, not the tag: an argument may hold `</tool_call>`, braces or quotes. JSON is read
strictly, as the servers that will run the model do: a raw newline in a string is `bad_json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from toolrl.toolcalls.blocks import Block, read
from toolrl.toolcalls.format_state import format_state
from toolrl.toolcalls.json_call import BadCall, read_call, read_value
from toolrl.toolcalls.parser import FormatState, Parsed, parsers
from toolrl.trajectory import CallError, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@parsers.register("hermes")
class Hermes:
    name = "hermes"
    tags = (OPEN, CLOSE)
    instructions = (
        "For each call write a JSON object with the tool's name and arguments within <tool_call> tags:\n<tool_call>\n"
        '{"name": <tool-name>, "arguments": <arguments-object>}\n</tool_call>'
    )

    def parse(self, text: str, first_call: int = 0) -> Parsed:
        return read(text, find, first_call)[0]

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{OPEN}\n{_payload(call)}\n{CLOSE}" for call in calls)

    def format_state(self, text: str, finish_reason: str) -> FormatState:
        return format_state(*read(text, find, 0), self.tags, finish_reason)


def _payload(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)


def find(text: str, position: int) -> Block | None:
    """The first call that opens at `position` or later."""
    start = text.find(OPEN, position)
    if start < 0:
        return None
    begin = start + len(OPEN)
    try:
        value, end = read_value(text, begin)
    except BadCall as error:
        return _broken(text, start, begin, error.as_error)
    close = text.find(CLOSE, end)
    if close < 0 or text[end:close].strip():
        extra = CallError("bad_json", f"unexpected text after the JSON object: {text[end : end + 40].strip()!r}")
        return _broken(text, start, end, extra)
    try:
        return Block(start, close + len(CLOSE), read_call(value))
    except BadCall as error:
        return Block(start, close + len(CLOSE), error.as_error)


def _broken(text: str, start: int, begin: int, error: CallError) -> Block:
    """A call that cannot be read: it ends at its closing tag, or unclosed where another opens or the text ends."""
    reopened = text.find(OPEN, begin)
    end = reopened if reopened >= 0 else len(text)
    close = text.find(CLOSE, begin, end)
    if close < 0:
        return Block(start, end, CallError("unclosed", f"the call is not closed: {CLOSE} is missing"))
    if not text[start + len(OPEN) : close].strip():
        error = CallError("empty", "the call is empty")
    return Block(start, close + len(CLOSE), error)
