r"""`tagged`: `<python>code</python>` calls the tool `python` with its code.

The first closing tag ends the call. Code that holds one is written with a backslash (`<\/python>`), one more for each
that stands there already, so that writing and reading are inverse.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolrl.toolcalls.blocks import Block, code_call, code_of, read
from toolrl.toolcalls.format_state import format_state
from toolrl.toolcalls.parser import FormatState, Parsed, parsers
from toolrl.trajectory import CallError, ToolCall

OPEN, CLOSE = "<python>", "</python>"
_CLOSE_IN_CODE = re.compile(r"<(\\*)/python>")


@parsers.register("tagged")
class Tagged:
    name = "tagged"
    tags = (OPEN, CLOSE)
    instructions = "To run Python, write the code between tags:\n<python>\n<code>\n</python>"

    def parse(self, text: str, first_call: int = 0) -> Parsed:
        return read(text, find, first_call)[0]

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{OPEN}\n{_escaped(code_of(call))}\n{CLOSE}" for call in calls)

    def format_state(self, text: str, finish_reason: str) -> FormatState:
        return format_state(*read(text, find, 0), self.tags, finish_reason)


def find(text: str, position: int) -> Block | None:
    """The first call that opens at `position` or later."""
    start = text.find(OPEN, position)
    if start < 0:
        return None
    begin = start + len(OPEN)
    close = text.find(CLOSE, begin)
    if close < 0:
        return Block(start, len(text), CallError("unclosed", f"the call is not closed: {CLOSE} is missing"))
    code = text[begin:close].removeprefix("\n").removesuffix("\n")
    return Block(start, close + len(CLOSE), code_call(_unescaped(code)))


def _escaped(code: str) -> str:
    return _CLOSE_IN_CODE.sub(lambda found: f"<\\{found.group(1)}/python>", code)


def _unescaped(code: str) -> str:
    return _CLOSE_IN_CODE.sub(lambda found: f"<{found.group(1)[1:]}/python>", code)
