"""Does a chat template continue a conversation without rewriting it? Asked before a run starts, of whole conversations.

At each generation prompt the template's whole render must be what the model has seen: the render so far, the policy's
turn up to its end token and the delta, as text and as ids. What the template does after the last answer changes
nothing any more: it is noted only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from toolrl.conversation import probes
from toolrl.conversation.delta import Deltas
from toolrl.conversation.dialects import Lost, dialects, said
from toolrl.conversation.encoding import Encoder
from toolrl.conversation.template import Dialect, Message, Template
from toolrl.toolcalls.parser import Parser

# How the generation prompt stands to thinking: the policy may open it, the prompt has opened it, or the prompt rules
# it out.
Thinking = Literal["optional", "opened", "closed"]


@dataclass(frozen=True, slots=True)
class Checked:
    """What a template does in a dialect."""

    dialect: Dialect
    deltas: Deltas | None = None
    thinking: Thinking = "optional"
    broken: str = ""  # what is left out, or what it raises
    rewrites: str = ""  # what stands differently in a later render, thinking aside
    rewrites_thinking: str = ""
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return not (self.broken or self.rewrites or self.rewrites_thinking)


def examine(template: Template, encoder: Encoder, parser: Parser | None) -> Checked:
    """The first dialect in which the template continues token by token, else the first that leaves nothing out.

    The template's own form of calls and results comes first: one that only removes thinking there is not moved to
    another.
    """
    tried: list[Checked] = []
    for dialect in dialects(template, parser):
        checked = _examine_dialect(template, encoder, dialect, parser)
        if checked.exact or (dialect.calls == "native" and not checked.broken and not checked.rewrites):
            return replace(checked, notes=checked.notes + _departures(checked.dialect, tried))
        tried.append(checked)
    best = next((checked for checked in tried if not checked.broken), tried[0])
    return replace(best, notes=best.notes + _departures(best.dialect, tried))


def _departures(dialect: Dialect, tried: list[Checked]) -> tuple[str, ...]:
    """In words, what is done otherwise than the template's own way, and why."""
    notes = []
    native = [c for c in tried if c.dialect.calls == "native"]
    same_form = [
        c for c in native if (c.dialect.arguments, c.dialect.call_ids) == (dialect.arguments, dialect.call_ids)
    ]
    if dialect.calls == "text":
        notes.append(f"calls are written into the content ({_why(native)})")
    if dialect.results == "user":
        notes.append("results are shown in user messages")
    if not dialect.text_beside_calls:
        notes.append(f"no text beside calls ({_why(c for c in same_form if c.dialect.text_beside_calls)})")
    if not dialect.parallel:
        notes.append(f"one call a message ({_why(c for c in same_form if not c.dialect.text_beside_calls)})")
    if dialect.system == "in_user":
        notes.append("the system message is put into the user's")
    if dialect.tools == "described":
        notes.append("tools are described in the system message")
    return tuple(notes)


def _why(tried: Iterable[Checked]) -> str:
    return next((checked.broken or checked.rewrites for checked in tried), "")


def _examine_dialect(template: Template, encoder: Encoder, dialect: Dialect, parser: Parser | None) -> Checked:
    try:
        deltas = Deltas(template, dialect, encoder)
        walk = _Walk(template, encoder, dialect, parser, deltas)
        thinking = walk.thinking()
        rewrites = walk.differs(thinking=thinking == "opened")
        notes = walk.notes
        rewrites_thinking = walk.differs(thinking=True) if thinking == "optional" else ""
    except Exception as error:  # a template raises what it likes
        return Checked(dialect, broken=said(error))
    return Checked(dialect, deltas, thinking, "", rewrites, "" if rewrites else rewrites_thinking, tuple(notes))


class _Walk:
    """One template in one dialect, led through whole conversations."""

    def __init__(
        self, template: Template, encoder: Encoder, dialect: Dialect, parser: Parser | None, deltas: Deltas
    ) -> None:
        self._template = template
        self._encoder = encoder
        self._dialect = dialect
        self._parser = parser
        self._deltas = deltas
        self.notes: list[str] = []

    def thinking(self) -> Thinking:
        """How the generation prompt stands to thinking."""
        first = probes.steps(self._dialect, self._parser, thinking=True)[0]
        plain = probes.steps(self._dialect, self._parser, thinking=False)[0]
        prompt = self._render(probes.opening(), generation=True)
        with_thought = self._render([*probes.opening(), first.message, *probes.result_messages(first)], generation=True)
        without = self._render([*probes.opening(), plain.message, *probes.result_messages(plain)], generation=True)
        if with_thought.startswith(prompt):
            before, thought, _ = with_thought[len(prompt) :].partition(first.thought)
            return "opened" if thought and not before.strip() else "optional"
        return "closed" if without.startswith(prompt) else "optional"

    def differs(self, *, thinking: bool) -> str:
        """Where a later render differs from what the model has seen, in words; empty if nowhere. Raises Lost."""
        steps = probes.steps(self._dialect, self._parser, thinking=thinking)
        messages = probes.opening()
        seen = self._render(messages, generation=True)
        ids = self._encoder.encode(seen)
        words = dict(probes.OPENING_WORDS)
        found = ""
        for turn, step in enumerate(steps[:-1], start=1):
            messages += [step.message, *probes.result_messages(step)]
            words |= step.words
            whole = self._render(messages, generation=True)
            if "{'code'" in whole:
                raise Lost("arguments are written as Python, not as JSON")
            if lost := next((meaning for word, meaning in words.items() if word not in whole), ""):
                raise Lost(f"the {lost} are left out")
            if not found:  # the rest of the walk only looks for what is left out
                more, found = self._turn(turn, step, seen, whole)
                ids += more
                if not found and ids != self._encoder.encode(whole):
                    found = f"the tokens of turn {turn} and of what stands around it merge in the whole render"
            seen = whole
        if not found:
            self._note_the_end(messages, steps[-1], seen)
        return found

    def _turn(self, turn: int, step: probes.Step, seen: str, whole: str) -> tuple[list[int], str]:
        """The ids that this turn and its delta add to what was seen, or what is wrong with it."""
        if not whole.startswith(seen):
            return [], f"after turn {turn} {_difference(seen, whole)}"
        delta = self._deltas.text(step.replies, step.results)
        if not whole.endswith(delta):
            called = whole.rfind(f"Code{turn}")
            return [], f"after turn {turn} {_difference(delta, whole[called:].partition(self._deltas.ends.call)[2])}"
        sampled = whole[len(seen) : len(whole) - len(delta)]
        if step.thought and step.thought not in sampled:
            beside = "" if self._dialect.text_beside_calls else " (all text beside calls is)"
            return [], f"the thinking of earlier turns is removed{beside}"
        if not sampled.endswith(self._deltas.ends.call):
            return [], f"turn {turn} does not end in {self._deltas.ends.call}"
        if self._parser and self._dialect.calls == "native" and not self._readable(sampled, step):
            raise Lost(f"the parser {self._parser.name} does not read the template's own calls")
        _, alone = self._deltas.turn_text(step.message, step.replies)
        if sampled != alone:
            return [], f"after turn {turn - 1} {_difference(alone, sampled)}"
        ids = turn_ids(self._encoder, seen, sampled)
        return ids + self._encoder.encode_after(self._deltas.ends.call, delta), ""

    def _note_the_end(self, messages: list[Message], last: probes.Step, seen: str) -> None:
        whole = self._render([*messages, last.message], generation=False)
        if not whole.startswith(seen):
            self.notes.append(f"once the last answer is given, {_difference(seen, whole)}")

    def _readable(self, sampled: str, step: probes.Step) -> bool:
        assert self._parser is not None
        expected = [c["function"] for c in step.message["tool_calls"]]
        found = self._parser.parse(sampled).calls
        return [(c.name, c.arguments) for c in found] == [(f["name"], f["arguments"]) for f in expected]

    def _render(self, messages: list[Message], *, generation: bool) -> str:
        return self._template.render(messages, self._dialect, generation=generation)


def turn_ids(encoder: Encoder, seen: str, text: str) -> list[int]:
    """The ids of a turn's text after `seen`, as a policy samples them: nothing merges with what it has seen."""
    controls = encoder.controls(seen)
    border = seen[controls[-1][1] :] if controls else seen
    before, whole = encoder.encode(border), encoder.encode(border + text)
    return whole[len(before) :] if whole[: len(before)] == before else encoder.encode(text)


def _difference(seen: str, whole: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(seen, whole, strict=False)) if a != b), min(len(seen), len(whole)))
    start = max(0, at - 12)
    return f"the template writes {whole[start : at + 28]!r} where the model had {seen[start : at + 28]!r}"
