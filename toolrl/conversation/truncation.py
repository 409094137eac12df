"""Cutting a text down to a number of tokens, with a note where something is missing."""

from __future__ import annotations

from typing import Literal

from toolrl.conversation.encoding import Encoder

Cut = Literal["head", "tail", "middle"]  # the part that is cut away


def truncate_tokens(text: str, max_tokens: int, encoder: Encoder, cut: Cut = "middle") -> tuple[str, bool]:
    """The text in at most `max_tokens` tokens, and whether anything was cut. Total: with no room at all it is empty."""
    spans = encoder.spans(text)
    if len(spans) <= max_tokens and len(encoder.encode(text)) <= max_tokens:
        return text, False
    keep = max_tokens
    while keep > 0:
        shortened = _shortened(text, spans, keep, cut)
        excess = len(encoder.encode(shortened)) - max_tokens
        if excess <= 0:
            return shortened, True
        keep -= max(excess, 1)
    # No room for the note: as much of the start (or of the end) as goes in.
    keep = max(0, max_tokens)
    while keep > 0:
        bare = text[spans[-keep][0] :] if cut == "head" else text[: spans[keep - 1][1]]
        if len(encoder.encode(bare)) <= max_tokens:
            return bare, True
        keep -= 1
    return "", True


def _shortened(text: str, spans: list[tuple[int, int]], keep: int, cut: Cut) -> str:
    """Head and tail that hold about `keep` tokens together, around the note."""
    keep = min(keep, len(spans) - 1)
    head = {"head": 0, "tail": keep, "middle": (keep + 1) // 2}[cut]
    tail = keep - head
    note = f"[{len(spans) - keep} tokens left out]"
    before = text[: spans[head - 1][1]] + "\n" if head else ""
    after = "\n" + text[spans[len(spans) - tail][0] :] if tail else ""
    return before + note + after
