"""What a chat template writes between a policy turn's end token and the next sampled token.

It is read off a short stand-in conversation, once for each kind of reply (how many results, of which tools, with
which call ids), and kept as fixed pieces around the results. `prefix_check` shows that the same text stands in whole
conversations.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolrl.conversation.encoding import Encoder
from toolrl.conversation.template import Dialect, Message, Template, TemplateRefused, assistant_message, tool_message
from toolrl.trajectory import ToolCall

MARK = "Mark7Q"  # one word, so that no template trims, splits or escapes it
# Texts that show whether a template puts a result in as it is.
_NASTY = ["  two\n\n\"quoted\" <b>\\n {x: '1'} é “☃”\n ", "x", "\tTrue", ""]


@dataclass(frozen=True, slots=True)
class Ends:
    """The control tokens that end policy turns."""

    call: str  # after a turn with calls: what the delta follows
    calls_hold: int  # how many of it stand after a call's last argument (or the content)
    answer: str  # after a final answer
    answer_tail: str  # what stands between its content and that token's end
    answer_rest: str  # what a render that ends with the answer holds after its content


@dataclass(frozen=True, slots=True)
class Pieces:
    """A delta with holes for the results; None where the template changes the results in a way that is not known."""

    fixed: tuple[str, ...] | None
    transform: Callable[[str], str] = str


class Deltas:
    """The deltas of one template in one dialect."""

    def __init__(self, template: Template, dialect: Dialect, encoder: Encoder) -> None:
        self._template = template
        self._dialect = dialect
        self.ends = _learn_ends(template, dialect, encoder)
        self._pieces = functools.lru_cache(maxsize=1024)(self._learn_pieces)

    def text(self, replies: Sequence[tuple[str, str]], texts: Sequence[str]) -> str:
        """The delta for results `texts` of calls given as (name, id)."""
        pieces = self._pieces(tuple(replies))
        if pieces.fixed is None:
            return self._rendered(replies, texts)
        filled = [pieces.fixed[0]]
        for text, fixed in zip(texts, pieces.fixed[1:], strict=True):
            filled += [pieces.transform(text), fixed]
        return "".join(filled)

    def turn_text(self, message: Message, replies: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """A generation prompt, and the text that a policy samples after it to write this message, end token included."""
        go: Message = {"role": "user", "content": "go"}
        prompt = self._template.render([go], self._dialect, generation=True)
        if replies:
            results = [tool_message(call_id, name, "x") for name, call_id in replies]
            whole = self._template.render([go, message, *results], self._dialect, generation=True)
            text = whole.removesuffix(self.text(replies, ["x"] * len(replies)))
        else:
            whole = self._template.render([go, message], self._dialect, generation=False)
            text = whole.removesuffix(self.ends.answer_rest) + self.ends.answer_tail
        if not whole.startswith(prompt):
            raise TemplateRefused(
                f"the template does not keep its generation prompt {prompt[-40:]!r} before such a turn (one that it "
                "has made to think needs its reasoning)"
            )
        return prompt, text[len(prompt) :]

    def _rendered(self, replies: Sequence[tuple[str, str]], texts: Sequence[str]) -> str:
        """The delta, rendered by the template."""
        messages = stand_in(self._dialect, replies)
        results = [tool_message(call_id, name, text) for (name, call_id), text in zip(replies, texts, strict=True)]
        whole = self._template.render([*messages, *results], self._dialect, generation=True)
        rest = _after_mark(whole, "calls")
        for _ in range(self.ends.calls_hold):
            _, end, rest = rest.partition(self.ends.call)
            if not end:
                raise TemplateRefused("the end of a policy turn depends on what follows it")
        return rest

    def _learn_pieces(self, replies: tuple[tuple[str, str], ...]) -> Pieces:
        for transform in (str, str.strip, _json):
            marks = [f"{MARK}{n}x" for n in range(len(replies))]
            rest, fixed = self._rendered(replies, marks), []
            for mark in marks:
                before, found, rest = rest.partition(transform(mark))
                if not found:
                    return Pieces(None)
                fixed.append(before)
            fixed.append(rest)
            pieces = Pieces(tuple(fixed), transform)
            if all(self._agrees(replies, pieces, text) for text in _NASTY):
                return pieces
        return Pieces(None)

    def _agrees(self, replies: tuple[tuple[str, str], ...], pieces: Pieces, text: str) -> bool:
        assert pieces.fixed is not None
        return self._rendered(replies, [text] * len(replies)) == pieces.transform(text).join(pieces.fixed)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def stand_in(dialect: Dialect, replies: Sequence[tuple[str, str]]) -> list[Message]:
    """A user message and an assistant message whose last words are the mark."""
    if dialect.calls == "text":
        return [{"role": "user", "content": "go"}, assistant_message(MARK + "end")]
    # A template that knows one call a message gets one, and all the results.
    calls = [
        ToolCall(call_id, name, {"code": MARK + "end"})
        for name, call_id in (replies if dialect.parallel else replies[:1])
    ]
    return [{"role": "user", "content": "go"}, assistant_message("", calls)]


def _learn_ends(template: Template, dialect: Dialect, encoder: Encoder) -> Ends:
    """Finds the end tokens. Raises TemplateRefused where no control token ends a turn."""
    user: Message = {"role": "user", "content": "go"}
    answered = [user, assistant_message(MARK + "end")]
    alone = _after_mark(template.render(answered, dialect, generation=False), "the assistant's words")
    followed = _after_mark(template.render([*answered, user], dialect, generation=True), "the assistant's words")
    eos = str(encoder.tokenizer.eos_token)
    answer_at, ended_by_next = _answer_end(alone, followed, eos, encoder)
    answer, answer_tail = answer_at[0], (followed if ended_by_next else alone)[: answer_at[2]]

    reply = [("python", "call_0")]
    messages = stand_in(dialect, reply)
    called = _after_mark(template.render(messages, dialect, generation=False), "calls")
    replied = template.render([*messages, tool_message("call_0", "python", "ok" + MARK)], dialect, generation=True)
    replied = _after_mark(replied[: replied.find("ok" + MARK)] if "ok" + MARK in replied else replied, "calls")
    shared = _common_prefix(called, replied)
    found = encoder.controls(replied[: len(shared)])
    if ended_by_next:
        found = [at for at in encoder.controls(replied) if at[1] >= len(shared)][:1]
    preferred = [at for at in found if at[0] == answer] or [at for at in found if at[0] == eos] or found
    if not preferred:
        preferred = encoder.controls(replied)[:1]
    if not preferred:
        raise TemplateRefused("no control token ends a turn with a call, so nothing tells where the policy stops")
    call, _, end = preferred[-1]
    return Ends(
        call=call, calls_hold=replied[:end].count(call), answer=answer, answer_tail=answer_tail, answer_rest=alone
    )


def _answer_end(alone: str, followed: str, eos: str, encoder: Encoder) -> tuple[tuple[str, int, int], bool]:
    """The control token (with its place) that ends an answer, and whether it is the next message's first token.

    `alone` is what follows the content in a conversation that ends there, `followed` in one that goes on.
    """
    shared = encoder.controls(_common_prefix(alone, followed))
    if shared:
        return next((at for at in shared if at[0] == eos), shared[-1]), False
    last = encoder.controls(alone)
    if last:  # a token of its own for the last answer
        return next((at for at in last if at[0] == eos), last[0]), False
    following = encoder.controls(followed)
    if following:
        return following[0], True
    raise TemplateRefused("no control token ends an assistant message, so nothing tells where the policy stops")


def _after_mark(text: str, what: str) -> str:
    _, mark, after = text.rpartition(MARK + "end")
    if not mark:
        raise TemplateRefused(f"{what} are left out")
    return after


def _common_prefix(one: str, other: str) -> str:
    size = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]
