"""The four states of a policy turn that monitors count (healthy call, healthy answer, polluted, collapsed).

Definitions, in the order in which they are asked:
- collapsed: an empty call, an unclosed call, or nothing but control tokens. An unclosed call at the length limit was
  cut, not collapsed: it counts as polluted.
- polluted: an attempt at a call that is not one, a tag or a piece of a tag outside a call, a control token in mid-text.
- healthy call, healthy answer: the rest, by whether there is a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolrl.toolcalls.parser import FormatState, Parsed

_CONTROL = r"(?:<[|｜][^<>|｜\s]{1,40}[|｜]>|</?s>|<(?:bos|eos|pad|unk)>|<(?:start|end)_of_turn>)"
_ANYWHERE = re.compile(_CONTROL)


def without_end_tokens(text: str) -> str:
    """The text without the control tokens at its end."""
    end = len(text)
    for token in reversed(list(_ANYWHERE.finditer(text))):
        if text[token.end() : end].strip():
            break
        end = token.start()
    return text[:end]


def without_control_tokens(text: str) -> str:
    """The text without anything that looks like a control token."""
    return _ANYWHERE.sub("", text)


def fragments(tags: Sequence[str]) -> list[str]:
    """What tells that a tag was meant: the tag, or the tag without its first or last character."""
    return [piece for tag in tags for piece in (tag, tag[1:], tag[:-1]) if len(piece) > 3]


def format_state(parsed: Parsed, outside: str, tags: Sequence[str], finish_reason: str) -> FormatState:
    """The state of a turn that was parsed to `parsed`, with `outside` its text around calls and thinking."""
    kinds = {error.kind for error in parsed.errors}
    outside = without_end_tokens(outside)
    nothing = not parsed.calls and not parsed.errors and not without_control_tokens(parsed.content).strip()
    if "empty" in kinds or nothing or ("unclosed" in kinds and finish_reason != "length"):
        return "collapsed"
    if kinds or _ANYWHERE.search(outside) or any(piece in outside for piece in fragments(tags)):
        return "polluted"
    return "healthy_call" if parsed.calls else "healthy_answer"
