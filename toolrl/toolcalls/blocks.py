"""The walk over a policy turn that all parsers share: blocks that are calls, thinking, and the text between them.

Blocks and thinking are read in the order in which they open, so that a call's argument may hold `</think>`
and a thought may hold a call. A closing `</think>` that nothing opened makes all text before it a thought:
the prompt had opened it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolrl.toolcalls.parser import Parsed, call_id
from toolrl.toolcalls.thinking import CLOSE
from toolrl.trajectory import CallError, ToolCall

_THINK = re.compile(r"</?think>")


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of text that is a call (its name and arguments) or failed to be one."""

    start: int
    end: int
    found: tuple[str, dict[str, Any]] | CallError


# The first block that starts at a position or later.
Find = Callable[[str, int], Block | None]


def read(text: str, find: Find, first_call: int) -> tuple[Parsed, str]:
    """The turn parsed, and its text outside calls and thinking."""
    calls: list[ToolCall] = []
    errors: list[CallError] = []
    content: list[str] = []
    outside: list[str] = []
    position = 0
    block = find(text, 0)
    closable = True
    while True:
        if block is not None and block.start < position:
            block = find(text, position)
        gap_end = len(text) if block is None else block.start
        tag = _THINK.search(text, position, gap_end) if closable else None
        if tag is not None:
            gap = text[position : tag.start()]
            if tag.group() == CLOSE:
                calls, errors, content, outside = [], [], [text[: tag.end()]], []
                position = tag.end()
                continue
            close = text.find(CLOSE, tag.end())
            closable = close >= 0
            end = close + len(CLOSE) if closable else tag.end()
            content += [gap, text[tag.start() : end]]
            outside.append(gap)
            position = end
            continue
        content.append(text[position:gap_end])
        outside.append(text[position:gap_end])
        if block is None:
            break
        if isinstance(block.found, CallError):
            errors.append(block.found)
        else:
            calls.append(ToolCall(call_id(first_call + len(calls)), *block.found))
        position = block.end
        block = find(text, position)
    whole = "".join(content).strip() if calls or errors else text
    return Parsed(whole, calls, errors), "".join(outside)


def code_of(call: ToolCall) -> str:
    """The code of a call to `python`, for formats that can write nothing else. Raises ValueError for another call."""
    code = call.arguments.get("code")
    if call.name != "python" or set(call.arguments) != {"code"} or not isinstance(code, str) or not code.strip():
        raise ValueError(f"this format can only call python with some code, not {call.name}({call.arguments})")
    return code


def code_call(code: str) -> tuple[str, dict[str, Any]] | CallError:
    """The call that runs `code`."""
    return ("python", {"code": code}) if code.strip() else CallError("empty", "the call holds no code")
