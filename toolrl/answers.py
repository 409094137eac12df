"""The final answer of an episode, read from what the policy wrote and from nothing else.

Invariants: total over any text; thinking is not an answer; a turn that calls a tool gives none, and neither does a
tool's output.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Literal

from toolrl.toolcalls.format_state import without_control_tokens
from toolrl.toolcalls.thinking import without_thinking
from toolrl.trajectory import Trajectory, Turn

How = Literal["boxed", "tag", "last_line"]

_BRACE = re.compile(r"\\boxed\s*\{|\\[{}\\]|[{}]")
_OPEN, _CLOSE = "<answer>", "</answer>"
_OPENS: dict[How, str] = {"boxed": "\\boxed", "tag": _OPEN}


def answer_of(source: Trajectory | Turn | str, how: How) -> str | None:
    r"""The answer in a trajectory's last policy turn, a policy turn, or a turn's text; None where there is none.

    `boxed`: what the last complete `\boxed{…}` holds; `tag`: the last `<answer>…</answer>`; `last_line`: the last
    line with text.
    """
    if isinstance(source, Trajectory):
        turns = source.policy_turns
        return answer_of(turns[-1], how) if turns else None
    if isinstance(source, Turn):
        if source.kind != "policy" or source.calls or source.call_errors:
            return None
        return answer_of(source.text, how)
    text = without_control_tokens(without_thinking(source))
    found = {"boxed": _boxed, "tag": _tagged, "last_line": _last_line}[how](text)
    return found.strip() or None if found is not None else None


def answer_tokens(turn: Turn, how: How, decode: Callable[[list[int]], str]) -> tuple[int, int] | None:
    """[start, end) of the tokens of a turn that hold the answer's text; None where it gives none.

    Args:
        decode: ids to text, as the turn's own text was made.
    """
    answer = answer_of(turn, how)
    if answer is None:
        return None
    text = decode(turn.token_ids)
    start = text.find(answer, max(text.rfind(_OPENS[how]), 0)) if how != "last_line" else text.rfind(answer)
    if start < 0:  # control tokens stand inside it
        return None
    counts = range(len(turn.token_ids) + 1)

    def characters(tokens: int) -> int:
        return len(decode(turn.token_ids[:tokens]))

    first = bisect_right(counts, start, key=characters) - 1
    return first, bisect_left(counts, start + len(answer), lo=first, key=characters)


def _boxed(text: str) -> str | None:
    """One pass with a stack, so that thousands of unclosed boxes cost no more than their length."""
    opened: list[int | None] = []  # where a box's content starts, None for another brace
    last: str | None = None
    for brace in _BRACE.finditer(text):
        mark = brace.group()
        if mark == "{":
            opened.append(None)
        elif mark.startswith("\\boxed"):
            opened.append(brace.end())
        elif mark == "}" and opened:
            start = opened.pop()
            if start is not None:  # an outer box closes later and takes the place of what it holds
                last = text[start : brace.start()]
    inner = re.fullmatch(r"\s*\\boxed\s*\{(.*)\}\s*", last, re.DOTALL) if last else None
    return inner.group(1) if inner else last


def _tagged(text: str) -> str | None:
    close = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, close) if close >= 0 else -1
    return text[start + len(_OPEN) : close] if start >= 0 else None


def _last_line(text: str) -> str | None:
    lines = text.rstrip().splitlines()
    return lines[-1] if lines else None
