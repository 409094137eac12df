"""The ways in which a chat template may want to be spoken to, found out by asking it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from toolrl.conversation.template import Dialect, Message, Template, TemplateRefused, assistant_message
from toolrl.toolcalls.parser import Parser
from toolrl.trajectory import ToolCall


class Lost(Exception):
    """A render leaves out something that was said: no later turn would know of it."""


def said(error: Exception) -> str:
    """An error that a template or our own check raised, in one line."""
    own = isinstance(error, TemplateRefused | Lost)
    return str(error) if own else f"{type(error).__name__}: {error}".splitlines()[0]


def dialects(template: Template, parser: Parser | None) -> Iterator[Dialect]:
    """The dialects to try, the template's own ways first. Raises TemplateRefused when it takes no user message."""
    base = _base_dialect(template)
    forms = [replace(base, call_ids=ids, arguments=form) for ids in ("ours", "nine") for form in ("object", "json")]
    for form in forms:
        for parallel in (True, False):
            yield replace(form, parallel=parallel)
            yield replace(form, parallel=parallel, text_beside_calls=False)
    text = replace(base, calls="text", tools="described" if parser and template.tools else "template")
    yield text
    yield replace(text, results="user")


def _base_dialect(template: Template) -> Dialect:
    """How the template takes content, system messages and thinking. TemplateRefused when it takes no user message."""
    why = "the user's message is left out"
    user: Message = {"role": "user", "content": "Ask0Q"}
    system: Message = {"role": "system", "content": "Rule0Q"}
    for content in ("string", "parts"):
        dialect = Dialect(content=content)
        try:
            if not _holds(template, [user], dialect, "Ask0Q"):
                continue
        except Exception as error:
            why = f"a user message raises {said(error)}"
            continue
        if not _accepts(template, [system, user], dialect, "Rule0Q"):
            dialect = replace(dialect, system="in_user")
        return _with_thinking(template, dialect)
    raise TemplateRefused(why)


# How models write their thinking where it is part of the content; a template's source tells which it knows.
_THOUGHTS = {"<channel|>": "<|channel>thought\n{}\n<channel|>", "[/THINK]": "[THINK]{}[/THINK]"}


def _with_thinking(template: Template, dialect: Dialect) -> Dialect:
    """The dialect with the field that the template reads thinking from, if there is one."""
    user: Message = {"role": "user", "content": "Ask0Q"}
    answer = assistant_message("Say", (), "Weigh0Q")
    call = assistant_message("", [ToolCall("call_0", "python", {"code": "1"})], "Weigh0Q")
    for field in ("reasoning_content", "thinking", "reasoning"):
        spoken = replace(dialect, thinking=field)
        if _accepts(template, [user, answer], spoken, "Weigh0Q") or _accepts(template, [user, call], spoken, "Weigh0Q"):
            return spoken
    known = [thought for mark, thought in _THOUGHTS.items() if mark in template.source]
    return replace(dialect, thought=known[0]) if known else dialect


def _holds(template: Template, messages: list[Message], dialect: Dialect, word: str) -> bool:
    return word in template.render(messages, dialect, generation=False)


def _accepts(template: Template, messages: list[Message], dialect: Dialect, word: str) -> bool:
    try:
        return _holds(template, messages, dialect, word)
    except Exception:  # whatever a template raises is its way of saying no
        return False
