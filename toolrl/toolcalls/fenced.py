"""`fenced`: a Markdown block of Python (```` ```python ````) calls the tool `python` with its code.

As in CommonMark a fence of n ≥ 3 backticks is closed by a line that starts with at least n: code that holds a fence is
written inside a longer one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolrl.toolcalls.blocks import Block, code_call, code_of, read
from toolrl.toolcalls.format_state import format_state
from toolrl.toolcalls.parser import FormatState, Parsed, parsers
from toolrl.trajectory import CallError, ToolCall

_OPEN = re.compile(r"(?m)^ {0,3}(`{3,})(?:python|py)[ \t]*\r?\n")
_LINE_OF_TICKS = re.compile(r"(?m)^(`{3,})(?![`\w])")
_TICKS = re.compile(r"(?m)^`{3,}")


@parsers.register("fenced")
class Fenced:
    name = "fenced"
    tags = ("```python", "```py")
    instructions = "To run Python, write the code in a Markdown block:\n```python\n<code>\n```"

    def parse(self, text: str, first_call: int = 0) -> Parsed:
        return read(text, find, first_call)[0]

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(_write(code_of(call)) for call in calls)

    def format_state(self, text: str, finish_reason: str) -> FormatState:
        return format_state(*read(text, find, 0), self.tags[:1], finish_reason)


def find(text: str, position: int) -> Block | None:
    """The first Python block that opens at `position` or later."""
    opening = _OPEN.search(text, position)
    if opening is None:
        return None
    for closing in _LINE_OF_TICKS.finditer(text, opening.end()):
        if len(closing.group(1)) >= len(opening.group(1)):
            code = text[opening.end() : closing.start()].removesuffix("\n")
            return Block(opening.start(), closing.end(), code_call(code))
    return Block(opening.start(), len(text), CallError("unclosed", "the code block is not closed: ``` is missing"))


def _write(code: str) -> str:
    fence = "`" * max([3, *(len(ticks.group()) + 1 for ticks in _TICKS.finditer(code))])
    return f"{fence}python\n{code}\n{fence}"
