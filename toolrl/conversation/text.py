"""Text that comes from outside (tool output) made safe to show to a model.

Invariants: every function is total and idempotent; after `neutralize` none of the given strings of two or more
characters is left. Clean first, then neutralise: removing a character could join two halves of a control string.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

_ANSI = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|[PX^_][^\x1b]{0,4096}\x1b\\|[@-Z\\-_])"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_BREAK, _BREAK_IN_SPACED = " ", "\u200b"


def clean_text(text: str | bytes) -> str:
    """Text without terminal escapes, control characters and lone surrogates; line ends become newlines."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    text = _ANSI.sub("", text) if "\x1b" in text else text
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _SURROGATE.sub("\ufffd", _CONTROL.sub("", text))


def neutralize(text: str, special_strings: Iterable[str]) -> str:
    """The text with every control string broken after its first character: `<|im_end|>` becomes `< |im_end|>`.

    Strings of one character and of whitespace only are left alone.
    """
    pattern = _pattern(frozenset(special_strings))
    # Breaking one occurrence can leave an overlapping one whole, so until none is left; each pass leaves fewer.
    while pattern is not None and pattern.search(text):
        text = pattern.sub(_broken, text)
    return text


def _broken(found: re.Match[str]) -> str:
    string = found.group()
    return string[0] + (_BREAK_IN_SPACED if _BREAK in string else _BREAK) + string[1:]


@functools.lru_cache(maxsize=64)
def _pattern(strings: frozenset[str]) -> re.Pattern[str] | None:
    # A string that holds the break itself could never be broken; no tokenizer has one.
    usable = [s for s in strings if len(s) > 1 and s.strip() and _BREAK_IN_SPACED not in s]
    if not usable:
        return None
    return re.compile("|".join(re.escape(s) for s in sorted(usable, key=lambda s: (-len(s), s))))
