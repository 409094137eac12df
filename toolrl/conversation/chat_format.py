"""A conversation as token ids, for any tokenizer with a chat template: the prompt, and what stands between policy turns.

Invariants:
- What the policy sampled is never encoded again: `observation_ids` gives only the ids that follow it.
- Prompt, sampled turns and observations together are the template's own render of the conversation; `__init__` checks
  that on whole conversations and raises TemplateRefused where it is not so (or says `split`, as asked).
- Observations hold no control token but the template's own.
Immutable after construction; every method may be called from any thread.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from toolrl.conversation.encoding import Encoder
from toolrl.conversation.messages import (
    shows_results_without_calls,
    with_results_of_failed_calls_as_user,
    with_tools,
    word,
)
from toolrl.conversation.prefix_check import Checked, examine, turn_ids
from toolrl.conversation.template import Message, Template, TemplateRefused, ToolSchema, assistant_message, tool_message
from toolrl.conversation.text import clean_text, neutralize
from toolrl.conversation.truncation import Cut, truncate_tokens
from toolrl.toolcalls.hermes import Hermes
from toolrl.toolcalls.parser import Parser
from toolrl.trajectory import ToolCall, ToolResult, Turn

_MARKUP = re.compile(r"<[^<>\s]{1,60}[^<>\n]{0,20}>|\[/?[A-Z_]{2,30}\]")


class ObservationTooLong(ValueError):
    """The template's own part of an observation does not fit into the budget."""

    def __init__(self, needed: int, budget: int) -> None:
        super().__init__(f"an observation takes at least {needed} tokens, {budget} are left")
        self.needed, self.budget = needed, budget


class ChatFormat:
    """One tokenizer, chat template and set of tools. `verdict` and `reason` say how the template was found."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[ToolSchema] = (),
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        on_rewritten_history: Literal["refuse", "split"] = "refuse",
        parser: Parser | None = None,
    ) -> None:
        """`chat_template` is a template's text or the path of a Jinja file; `parser` is what reads the policy's calls.

        Raises:
            TemplateRefused: the template rewrites (or, even for `split`, leaves out) what was said; the message says
            what.
        """
        self._encoder = Encoder(tokenizer)
        self._template = Template(tokenizer, tools, chat_template, template_options)
        self._parser = parser
        checked = examine(self._template, self._encoder, parser)
        if checked.broken or checked.deltas is None:
            raise TemplateRefused(f"the chat template cannot be used with tools: {checked.broken}")
        rewritten = checked.rewrites or checked.rewrites_thinking
        if rewritten and on_rewritten_history == "refuse":
            raise TemplateRefused(
                f"the chat template rewrites earlier turns: {rewritten}. Use another template (model.chat_template), "
                "or model.on_rewritten_history=split"
            )
        self.verdict: Literal["exact", "split"] = "split" if rewritten else "exact"
        self.reason = "; ".join(part for part in (rewritten, *checked.notes) if part)
        self.checked: Checked = checked
        self._dialect, self._deltas = checked.dialect, checked.deltas
        self.control_token_ids = self._encoder.control_ids
        ends = [checked.deltas.ends.call, checked.deltas.ends.answer, str(tokenizer.eos_token)]
        self.stop_token_ids = list(
            dict.fromkeys(self._encoder.control[end] for end in ends if end in self._encoder.control)
        )
        self._template_controls = functools.lru_cache(maxsize=1024)(self._count_template_controls)
        self._call_end = self._encoder.control[checked.deltas.ends.call]
        self._shows_results_without_calls = shows_results_without_calls(self._template, self._dialect)
        markup = _MARKUP.findall(self._deltas.text([("python", "call_0")] * 2, ["x", "x"]))
        tags = parser.tags if parser else ()
        self._special = frozenset([*self._encoder.control, *markup, *tags, "<think>", "</think>"])

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation that the policy is to continue."""
        return self._encoder.encode(self._prompt_text(messages))

    def observation_text(
        self, raw: str | bytes, max_tokens: int | None = None, cut: Cut = "middle"
    ) -> tuple[str, bool]:
        """A tool's output as the model may see it: clean, neutralised, at most `max_tokens`; and whether it was cut."""
        text = neutralize(clean_text(raw), self._special)
        if max_tokens is None:
            return text, False
        shown, cut_away = truncate_tokens(text, max_tokens, self._encoder, cut)
        return neutralize(shown, self._special), cut_away

    def observation_ids(
        self,
        policy_turn: Turn,
        results: Sequence[ToolResult],
        budget_tokens: int | None = None,
        cut: Cut = "middle",
    ) -> list[int]:
        """The ids between the policy turn's last sampled token and the next sampled token.

        A turn that was cut before its end token gets that token here, untrained. `text` and `truncated` of the
        results are set to what the model sees.

        Raises:
            ObservationTooLong: not even empty results fit into `budget_tokens`.
            ValueError: no results.
        """
        if not results:
            raise ValueError(
                "an observation needs at least one result: give an error result where a call could not be read"
            )
        supplied = [] if policy_turn.token_ids and policy_turn.token_ids[-1] == self._call_end else [self._call_end]
        replies = [(word(result.name), word(result.call_id)) for result in results]
        texts = [self.observation_text(result.text)[0] for result in results]
        ids, texts = self._delta_ids(replies, texts)
        cut_away = [False] * len(texts)
        if budget_tokens is not None and len(supplied) + len(ids) > budget_tokens:
            ids, shown = self._shortened(replies, texts, budget_tokens - len(supplied), cut)
            cut_away = [now != before for now, before in zip(shown, texts, strict=True)]
            texts = shown
        for result, text, cut_here in zip(results, texts, cut_away, strict=True):
            result.text, result.truncated = text, result.truncated or cut_here
        return supplied + ids

    def assistant_ids(self, content: str, calls: Sequence[ToolCall] = (), reasoning: str = "") -> list[int]:
        """What a policy samples that writes this message perfectly, its end token included."""
        written = list(calls) if self._dialect.calls == "native" else []
        if calls and not written:
            content = "\n".join(part for part in (content, (self._parser or Hermes()).render(calls)) if part)
        message = assistant_message(content, written, reasoning)
        return turn_ids(self._encoder, *self._deltas.turn_text(message, [(call.name, call.id) for call in calls]))

    def split_prompt_ids(self, messages: Sequence[Message], turns: Sequence[Turn]) -> list[int]:
        """The prompt of the next segment, for verdict `split`: the template's own render of all that was said."""
        said = self.history(turns)
        if not self._shows_results_without_calls:
            said = with_results_of_failed_calls_as_user(said)
        return self.prompt_ids([*messages, *said])

    def history(self, turns: Sequence[Turn]) -> list[Message]:
        """The turns as messages, with the calls that the policy made."""
        messages: list[Message] = []
        for turn in turns:
            if turn.kind == "tool":
                messages += [tool_message(word(r.call_id), word(r.name), r.text) for r in turn.results]
            else:
                messages.append(self._message_of(turn))
        return messages

    def _message_of(self, turn: Turn) -> Message:
        text, reasoning = self._without_end(turn.text), ""
        if self._dialect.thinking != "inline" and "</think>" in text:
            thought, _, text = text.partition("</think>")
            reasoning, text = thought.replace("<think>", "", 1).strip("\n"), text.lstrip("\n")
        if self._dialect.thinking == "inline" and self.checked.thinking == "opened" and "<think>" not in text:
            text = "<think>\n" + text  # the prompt had opened it
        if self._dialect.calls == "text" or not turn.calls:
            return assistant_message(text, (), reasoning)
        content = self._parser.parse(text).content if self._parser else text
        return assistant_message(content, turn.calls, reasoning)

    def _without_end(self, text: str) -> str:
        ends = {self._deltas.ends.call, self._deltas.ends.answer, str(self._encoder.tokenizer.eos_token)}
        while last := next((end for end in ends if text.endswith(end)), ""):
            text = text.removesuffix(last)
        return text

    def _prompt_text(self, messages: Sequence[Message]) -> str:
        if self._dialect.tools == "described" and self._template.tools and self._parser:
            messages = with_tools(messages, self._template.tools, self._parser.instructions)
        return self._template.render(messages, self._dialect, generation=True)

    def _delta_ids(self, replies: Sequence[tuple[str, str]], texts: list[str]) -> tuple[list[int], list[str]]:
        """The delta's ids, and the texts in it: without what would have become a control token."""
        ids = self._encode_delta(replies, texts)
        if sum(i in self.control_token_ids for i in ids) != self._template_controls(tuple(replies)):
            texts = [self._encoder.without_controls(text) for text in texts]
            ids = self._encode_delta(replies, texts)
        return ids, texts

    def _encode_delta(self, replies: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[int]:
        return self._encoder.encode_after(self._deltas.ends.call, self._deltas.text(replies, texts))

    def _count_template_controls(self, replies: tuple[tuple[str, str], ...]) -> int:
        return sum(i in self.control_token_ids for i in self._encode_delta(replies, ["x"] * len(replies)))

    def _shortened(
        self, replies: Sequence[tuple[str, str]], texts: list[str], budget: int, cut: Cut
    ) -> tuple[list[int], list[str]]:
        """The delta with its texts cut down so that it fits, the longest first."""
        shown = [""] * len(texts)
        empty, _ = self._delta_ids(replies, shown)
        if len(empty) > budget:
            raise ObservationTooLong(len(empty), budget)
        sizes = [len(self._encoder.encode(text)) for text in texts]
        room = budget - len(empty)
        while room > 0:
            share = _share(sizes, room)
            ids, shown = self._delta_ids(replies, [self.observation_text(text, share, cut)[0] for text in texts])
            if len(ids) <= budget:
                return ids, shown
            room -= len(ids) - budget
        return empty, [""] * len(texts)


def _share(sizes: Sequence[int], room: int) -> int:
    """The largest bound b with Σ min(size, b) ≤ room."""
    left, bound = room, 0
    for position, size in enumerate(ordered := sorted(sizes)):
        bound = left // (len(ordered) - position)
        if size > bound:
            return bound
        left -= size
    return max(sizes, default=0)
