"""The conversations a chat template is examined with. Each piece has a word of its own: what is left out can be named."""

from __future__ import annotations

from dataclasses import dataclass

from toolrl.conversation.template import Dialect, Message, assistant_message, tool_message
from toolrl.toolcalls.hermes import Hermes
from toolrl.toolcalls.parser import Parser
from toolrl.trajectory import ToolCall

THOUGHT = "Weigh{}Q both sides"


@dataclass(frozen=True, slots=True)
class Step:
    """One policy turn and the results of its calls; the last step has neither."""

    message: Message
    replies: list[tuple[str, str]]  # name and id of each call
    results: list[str]
    words: dict[str, str]  # what a later render must hold, and what each word stands for
    thought: str


OPENING_WORDS = {"Rule0Q": "words of the system message", "Ask0Q": "words of the question"}


def opening() -> list[Message]:
    return [{"role": "system", "content": "Rule0Q: use tools."}, {"role": "user", "content": "Ask0Q: what is it?"}]


def steps(dialect: Dialect, parser: Parser | None, *, thinking: bool) -> list[Step]:
    """Three turns with calls (one, one without content, two) and an answer."""
    made: list[Step] = []
    shapes = [("Say{}Q.", 1), ("", 1), ("Say{}Q\n\nand so on.", 2 if dialect.parallel else 1), ("Say{}Q: 42", 0)]
    for turn, (say, count) in enumerate(shapes, start=1):
        content = say.format(turn) if dialect.text_beside_calls or not count else ""
        calls = [
            ToolCall(f"call_{turn}{n}", "python", {"code": f'a = {{"k": 1}}\nprint("Code{turn}{n}Q")'})
            for n in range(count)
        ]
        replies = [(call.name, call.id) for call in calls]
        # A result of nothing is a case of its own: some templates leave such messages out.
        results = ["" if turn == 2 else f'Got{turn}{n}Q\n<ok> "yes"' for n in range(count)]
        words = {f"Code{turn}{n}Q": f"calls of turn {turn}" for n in range(count)}
        words |= {f"Got{turn}{n}Q": f"results of turn {turn}" for n in range(count) if turn != 2}
        words |= {f"Say{turn}Q": f"words of turn {turn}"} if content else {}
        thought = THOUGHT.format(turn) if thinking else ""
        if dialect.calls == "text":
            written = (parser or Hermes()).render(calls)
            message = assistant_message("\n".join(part for part in (content, written) if part), (), thought)
        else:
            message = assistant_message(content, calls, thought)
        made.append(Step(message, replies, results, words, thought))
    return made


def result_messages(step: Step) -> list[Message]:
    return [tool_message(i, name, text) for (name, i), text in zip(step.replies, step.results, strict=True)]
