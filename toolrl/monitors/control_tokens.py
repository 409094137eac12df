"""The control tokens of a tokenizer and what they are for, asked of the chat template: it writes a perfect turn, and the
tokens in it are read. Nothing is searched in what a policy wrote.

A call format whose tags are several tokens each has no call tags here: of it only thoughts, ends and the template's own
tokens are watched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolrl.conversation import ChatFormat
from toolrl.toolcalls import thinking
from toolrl.toolcalls.parser import Parser
from toolrl.trajectory import ToolCall, ToolResult, Turn

_CALL = ToolCall("call_0", "python", {"code": "1"})


@dataclass(frozen=True, eq=False)
class ControlTokens:
    """C watched tokens. Roles are places among them, -1 where the format has no such token."""

    ids: np.ndarray  # [C] int64
    names: tuple[str, ...]  # as metrics call them: tool_call, end_tool_call, im_end
    blank: np.ndarray  # [V] bool, tokens of whitespace alone
    ends_line: np.ndarray  # [V] bool, tokens whose text ends in a newline
    ends: tuple[int, ...]  # they end a turn
    in_text: tuple[int, ...] = ()  # a plain answer holds them: a channel's name, say
    opens_call: int = -1
    closes_call: int = -1
    in_call: tuple[int, ...] = ()  # between the two
    opens_thought: int = -1
    closes_thought: int = -1

    @classmethod
    def of(cls, tokenizer: Any, chat: ChatFormat, parser: Parser) -> ControlTokens:
        """Those that the template writes, that the parser reads as one token, or that end a turn."""
        texts = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(chat.control_token_ids)}
        tokens = {text: token for token, text in texts.items()}
        thoughts = [tokens.get(tag, -1) for tag in (thinking.OPEN, thinking.CLOSE)]
        ends = [token for token in chat.stop_token_ids if token in texts]
        said = [token for token in _said(chat) if token in texts and token not in (*ends, *thoughts)]
        tags = [token for token in _said(chat, _CALL) if token in texts and token not in (*said, *ends, *thoughts)]
        written = [*chat.prompt_ids([{"role": "user", "content": "x"}]), *_observation(chat)]
        found = [*tags, *(tokens.get(tag, -1) for tag in parser.tags), *thoughts, *ends, *said, *written]
        watched = list(dict.fromkeys(token for token in found if token in texts))
        place = {token: index for index, token in enumerate(watched)} | {-1: -1}
        opens = tags[0] if tags else -1
        closes = tags[-1] if tags and tags[-1] != opens else -1
        blank, ends_line = _whitespace(tokenizer)
        return cls(
            ids=np.asarray(watched, dtype=np.int64),
            names=_names([texts[token] for token in watched]),
            blank=blank,
            ends_line=ends_line,
            ends=tuple(place[token] for token in ends),
            in_text=tuple(place[token] for token in dict.fromkeys(said)),
            opens_call=place[opens],
            closes_call=place[closes],
            in_call=tuple(place[token] for token in dict.fromkeys(tags) if token not in (opens, closes)),
            opens_thought=place[thoughts[0]],
            closes_thought=place[thoughts[1]],
        )

    def kinds(self, tokens: np.ndarray) -> np.ndarray:
        """[n] the place among the watched tokens, -1 for any other token."""
        same = tokens[:, None] == self.ids
        return np.where(same.any(1), same.argmax(1), -1) if len(self.ids) else np.full(len(tokens), -1)

    @staticmethod
    def marked(marks: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """[n] bool from the [V] marks; a token beyond the tokenizer's (models have spare rows) has none."""
        found: np.ndarray = marks[np.minimum(tokens, len(marks) - 1)] & (tokens < len(marks))
        return found


def _said(chat: ChatFormat, *calls: ToolCall) -> list[int]:
    """A turn that makes these calls, or says something; empty where only the model knows how to write it."""
    reasoning = "x" if chat.checked.thinking == "opened" else ""
    try:
        return chat.assistant_ids("" if calls else "x", calls, reasoning)
    except ValueError:  # a parser that reads calls and cannot write them, of a template that has no form for them
        return []


def _observation(chat: ChatFormat) -> list[int]:
    return chat.observation_ids(Turn("policy", []), [ToolResult(_CALL.id, _CALL.name, "ok", "1")])


def _whitespace(tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """([V] whether a token is whitespace alone, [V] whether its text ends in a newline)."""
    size = len(tokenizer)
    texts = tokenizer.batch_decode([[token] for token in range(size)], clean_up_tokenization_spaces=False)
    blank = np.fromiter((bool(text) and text.isspace() for text in texts), dtype=bool, count=size)
    ends_line = np.fromiter((text.endswith("\n") for text in texts), dtype=bool, count=size)
    return blank, ends_line


def _names(texts: Sequence[str]) -> tuple[str, ...]:
    """`<tool_call>` → tool_call, `</tool_call>` and `<tool_call|>` → end_tool_call, `<|im_end|>` → im_end; each name once."""
    found: list[str] = []
    for text in texts:
        closes = text.startswith(("</", "[/")) or (text.endswith("|>") and not text.startswith("<|"))
        word = re.sub(r"\W+", "_", text.replace("▁", "_")).strip("_") or "token"
        name = f"end_{word}" if closes else word
        found.append(name if name not in found else f"{name}_{len(found)}")
    return tuple(found)
