"""A tokenizer as this package uses it: text to ids and nothing else, from any thread.

Invariants: no token is added or cut; control tokens in the text become their single ids. A fast tokenizer's Rust part
is copied, so that a caller who truncates or pads with the original in another thread changes nothing here.
"""

from __future__ import annotations

import copy
import itertools
import re
import threading
from typing import Any

_PROBE = "Say <b>it</b>:\n\n  2+2 = 4 “ok” \\boxed{4}"


class Encoder:
    """Encodes text with `tokenizer`, any Hugging Face tokenizer, fast or slow."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        self._fast = self._copy_of_the_fast_part()
        added: dict[int, Any] = dict(tokenizer.added_tokens_decoder)
        self.control: dict[str, int] = {
            str(token.content): int(index)
            for index, token in added.items()
            if _is_control(token.content, token.special)
        }
        for string in tokenizer.all_special_tokens:
            self.control.setdefault(str(string), int(tokenizer.convert_tokens_to_ids(string)))
        self.control_ids = frozenset(self.control.values())
        strings = sorted((re.escape(s) for s in self.control), key=lambda s: (-len(s), s))
        self._control_pattern = re.compile("|".join(strings)) if strings else None

    def encode(self, text: str) -> list[int]:
        if self._fast is not None:
            ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
            return ids
        with self._lock:
            return list(self.tokenizer.encode(text, add_special_tokens=False))

    def encode_after(self, before: str, text: str) -> list[int]:
        """The ids of `text` where it follows the control token `before`."""
        ids = self.encode(before + text)
        if not ids or ids[0] != self.control.get(before):
            raise ValueError(f"{before!r} is not one token of this tokenizer")
        return ids[1:]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Start and end character of each token; spread evenly over words where the tokenizer does not tell."""
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=False).offsets)
        spans: list[tuple[int, int]] = []
        for piece in re.finditer(r"\s*\S{1,64}|\s+", text):
            count = max(1, len(self.encode(piece.group())))
            width = piece.end() - piece.start()
            edges = [piece.start() + width * i // count for i in range(count + 1)]
            spans.extend(itertools.pairwise(edges))
        return spans

    def without_controls(self, text: str) -> str:
        """The text without anything that this tokenizer reads as a control token, be it after its own normalisation."""
        for _ in range(4):
            if self.control_ids.isdisjoint(self.encode(text)):
                return text
            if self._fast is None:
                break
            read = self._fast.encode(text, add_special_tokens=False)
            for index, (start, end) in reversed(list(zip(read.ids, read.offsets, strict=True))):
                if index in self.control_ids:
                    text = text[:start] + "?" + text[end:]
        text = re.sub(r"[^\w\s.,:=+-]", " ", text)
        return text if self.control_ids.isdisjoint(self.encode(text)) else ""

    def controls(self, text: str) -> list[tuple[str, int, int]]:
        """The control strings in `text` with their places, in order."""
        if self._control_pattern is None:
            return []
        return [(found.group(), found.start(), found.end()) for found in self._control_pattern.finditer(text)]

    def _copy_of_the_fast_part(self) -> Any:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        fast = copy.deepcopy(backend)
        fast.no_truncation()
        fast.no_padding()
        same = list(fast.encode(_PROBE, add_special_tokens=False).ids) == list(
            self.tokenizer.encode(_PROBE, add_special_tokens=False)
        )
        return fast if same else None


def _is_control(content: str, special: bool) -> bool:
    """Whether an added token steers a model: special ones and markup like `<tool_call>`; not whitespace, not words."""
    return bool(content.strip()) and (special or not re.fullmatch(r"[\w\s]+", content))
