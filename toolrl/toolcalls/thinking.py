"""Text outside thinking blocks. A first `</think>` without an opening tag closes what the prompt had opened."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def without_thinking(text: str) -> str:
    """The text outside thinking; after an opening tag that is never closed everything is thinking."""
    kept: list[str] = []
    first_close, first_open = text.find(CLOSE), text.find(OPEN)
    position = first_close + len(CLOSE) if first_close >= 0 and not 0 <= first_open < first_close else 0
    while (start := text.find(OPEN, position)) >= 0:
        kept.append(text[position:start])
        close = text.find(CLOSE, start)
        if close < 0:
            return "".join(kept)
        position = close + len(CLOSE)
    kept.append(text[position:])
    return "".join(kept)
