"""What a tool-call parser is, and the registry of them.

Invariants every parser keeps:
- `parse` is total: any text gives calls or typed errors, never an exception.
- Text without a call or an attempt at one comes back untouched as `content`.
- `parse(render(calls)).calls == calls` for every call that the format can express.
- A call inside a closed thinking block is a thought, not a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from toolrl.registry import Registry
from toolrl.trajectory import CallError, ToolCall

FormatState = Literal["healthy_call", "healthy_answer", "polluted", "collapsed"]


@dataclass(frozen=True, slots=True)
class Parsed:
    """One policy turn, read. `content` is the text around the calls (thinking included)."""

    content: str
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[CallError] = field(default_factory=list)

    @property
    def unclosed(self) -> bool:
        """Whether the text ends inside a call: with finish reason `length` that is a cut, not a mistake."""
        return any(error.kind == "unclosed" for error in self.errors)


class Parser(Protocol):
    """One way of writing calls in text."""

    @property
    def name(self) -> str: ...

    @property
    def tags(self) -> Sequence[str]:
        """The strings that delimit a call: made harmless wherever a tool's output holds them."""
        ...

    @property
    def instructions(self) -> str:
        """How to write a call, told to the model where its chat template does not."""
        ...

    def parse(self, text: str, first_call: int = 0) -> Parsed:
        """Reads one policy turn; its calls are named `call_N` from N = `first_call` on."""
        ...

    def render(self, calls: Sequence[ToolCall]) -> str:
        """What a model would write to make these calls. Raises ValueError for one that the format cannot express."""
        ...

    def format_state(self, text: str, finish_reason: str) -> FormatState: ...


parsers: Registry[Callable[[], Parser]] = Registry("tool-call parser")


def get(name: str, *, external: Callable[[str], Parser] | None = None) -> Parser:
    """The parser called `name`: a registered one, an import path, or whatever `external` makes of `vllm:NAME`.

    Raises:
        UnknownName: no parser answers to the name.
        ValueError: `vllm:NAME` without an `external` to build it.
    """
    if name.startswith("vllm:"):
        if external is None:
            raise ValueError(f"tool-call parser {name!r} needs vLLM: pass external= a function that builds it")
        return external(name.removeprefix("vllm:"))
    return parsers.get(name)()


def call_id(index: int) -> str:
    """The id of a trajectory's call number `index`."""
    return f"call_{index}"
