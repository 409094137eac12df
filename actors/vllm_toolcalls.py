"""`vllm:NAME`: any tool-call parser that vLLM ships, behind this project's Parser interface.

Invariants: `parse` is total, whatever vLLM's parser raises becomes a typed error; no turn is read with what another turn left
behind; arguments are JSON objects, read as strictly as those of our own parsers. vLLM's parsers only read: the chat
template writes calls, so `render` raises ValueError.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.engine.parser_engine_config import ParserState
from vllm.tool_parsers import ToolParserManager

from toolrl.errors import UserError
from toolrl.registry import UnknownName, nearest
from toolrl.toolcalls import FormatState, Parsed, Parser, call_id
from toolrl.toolcalls.format_state import format_state
from toolrl.toolcalls.json_call import BadCall, read_call, read_value
from toolrl.toolcalls.thinking import CLOSE, OPEN, without_thinking
from toolrl.trajectory import CallError, ToolCall

_TAG = re.compile(r"</?[\w|:｜][^<>\n]{0,40}[>]?|\[/?[A-Z_]{3,}\]|<[|｜][^<>\n]{1,40}[|｜]>")
_THINKING = re.compile(r"think|reason|response|result|output", re.IGNORECASE)
_CALLING = re.compile(r"tool|call|func|python|invoke", re.IGNORECASE)


class ParserUnavailable(UserError):
    """vLLM's parser does not work with this tokenizer, or not on text; the message says why."""


def vllm_parser_factory(tokenizer: Any, tools: Sequence[dict[str, Any]] = ()) -> Callable[[str], Parser]:
    """What `toolcalls.get(name, external=…)` takes to build `vllm:NAME`."""
    return lambda name: VllmParser(name, tokenizer, tools)


def names() -> list[str]:
    """Every parser that the installed vLLM knows."""
    return list(ToolParserManager.list_registered())


class VllmParser:
    """One of vLLM's parsers for one tokenizer and set of tools.

    Raises:
        UnknownName: vLLM has no parser of that name.
        ParserUnavailable: the parser cannot be built for this tokenizer, or reads something else than text.
    """

    instructions = ""  # the chat template tells the model how to call

    def __init__(self, name: str, tokenizer: Any, tools: Sequence[dict[str, Any]] = ()) -> None:
        if name not in names():
            raise UnknownName(f"vLLM has no tool-call parser {name!r}{nearest(name, names())}")
        self.name = f"vllm:{name}"
        self._tokenizer = tokenizer
        self._own = threading.local()
        self._request = ChatCompletionRequest(
            messages=[{"role": "user", "content": ""}], model=name, tools=list(tools) or None
        )
        # They log a traceback for each call that cannot be read: here that is an observation of every day.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        try:
            self._class = ToolParserManager.get_tool_parser(name)
            probe = self._new()
            probe.extract_tool_calls("text", self._request)
        except Exception as error:  # they raise what they like, down to NotImplementedError
            raise ParserUnavailable(f"vLLM's tool-call parser {name!r} cannot be used here: {_said(error)}") from error
        self.tags = sorted({*_tags(probe), *_call_tokens(tokenizer)})

    def parse(self, text: str, first_call: int = 0) -> Parsed:
        thought, said = _thought_and_rest(text)
        ends = "|".join(re.escape(token) for token in self._tokenizer.all_special_tokens)
        last_error: CallError | None = None
        spoken = said
        # The end token stays in a turn's text; some formats can only be read without it, some end in a tag of their own.
        for _ in range(4):
            found, error = self._extract(spoken)
            last_error = last_error or error
            if found is not None and found.tools_called:
                return self._read(found, thought, first_call, self._ends_in_a_call(spoken))
            end = re.search(rf"(?:{ends})\s*\Z", spoken[-80:]) if ends else None
            if end is None:
                break
            spoken = spoken[: len(spoken) - len(end.group())]
        if last_error is None and (tags := [tag for tag in self.tags if tag in said]):
            several = sum(said.count(tag) for tag in tags) > 1
            last_error = CallError("bad_json" if several else "unclosed", f"{tags[0]} opens a call that cannot be read")
        return Parsed(text, [], [last_error] if last_error else [])

    def render(self, calls: Sequence[ToolCall]) -> str:
        raise ValueError(f"{self.name} reads calls only: the chat template writes them")

    def format_state(self, text: str, finish_reason: str) -> FormatState:
        parsed = self.parse(text)
        return format_state(parsed, without_thinking(parsed.content) if parsed.calls else "", self.tags, finish_reason)

    def _ready(self) -> Any:
        """A vLLM parser without memory: a new one, or this thread's own where making it is dear and it starts anew."""
        if not self._class.engine_based_streaming:
            return self._new()
        if not hasattr(self._own, "parser"):
            self._own.parser = self._new()
        return self._own.parser

    def _new(self) -> Any:
        parser = self._class(self._tokenizer, self._request.tools or None)
        if hasattr(parser, "skip_reasoning_parsing"):  # as vLLM does where no reasoning parser is configured
            parser.skip_reasoning_parsing = True
        return parser

    def _extract(self, text: str) -> tuple[Any, CallError | None]:
        try:
            return self._ready().extract_tool_calls(text, self._request), None
        except Exception as error:
            return None, CallError("bad_json", f"the call cannot be read: {_said(error)}")

    def _ends_in_a_call(self, text: str) -> bool:
        """Whether the text breaks off inside a call: vLLM's engine-based parsers then give what they have as a call."""
        engine = vars(self._ready()).get("_parser_engine")
        if engine is None:
            return False
        engine._reset(initial_state=ParserState.CONTENT)
        engine._feed(text + "\n", [])  # the newline so that the lexer holds nothing back
        return engine._engine.state in (ParserState.TOOL_NAME, ParserState.TOOL_ARGS)

    def _read(self, found: Any, thought: str, first_call: int, ends_in_a_call: bool) -> Parsed:
        calls: list[ToolCall] = []
        errors: list[CallError] = []
        if ends_in_a_call:
            errors.append(CallError("unclosed", "the call is not closed"))
        for call in found.tool_calls[: -1 if ends_in_a_call else None]:
            try:
                name, arguments = _call(call.function.name, call.function.arguments)
                calls.append(ToolCall(call_id(first_call + len(calls)), name, arguments))
            except BadCall as error:
                errors.append(error.as_error)
        return Parsed((thought + (found.content or "")).strip(), calls, errors)


def _call(name: Any, written: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call with its arguments as JSON text. Raises BadCall."""
    text = written if isinstance(written, str) else json.dumps(written, default=str)
    if not text.strip():
        text = "{}"  # how some formats write a call without arguments
    try:
        arguments, end = read_value(text)
    except BadCall as error:
        raise BadCall("unclosed" if _breaks_off(text) else error.kind, str(error)) from None
    if text[end:].strip():
        raise BadCall("bad_json", f"unexpected text after the arguments: {text[end : end + 40].strip()!r}")
    return read_call({"name": name, "arguments": arguments})


def _breaks_off(text: str) -> bool:
    """Whether JSON is wrong only in that it stops."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False


def _thought_and_rest(text: str) -> tuple[str, str]:
    """A turn that begins with thinking (opened by the policy or the prompt), taken apart after it."""
    head, close, rest = text.partition(CLOSE)
    if close and (head.lstrip().startswith(OPEN) or OPEN not in head):
        return head + close, rest
    return "", text


def _tags(parser: Any) -> Iterator[str]:
    """The markup that a vLLM parser looks for, as far as it says so in attributes or in its engine's terminals."""
    constants = vars(sys.modules[type(parser).__module__])
    attributes = {key: getattr(parser, key, None) for key in dir(type(parser)) if not key.startswith("__")}
    for key, value in (constants | attributes | vars(parser)).items():
        if isinstance(value, str) and not _THINKING.search(key) and _TAG.fullmatch(value.strip()):
            yield value.strip()
    engine = vars(parser).get("_parser_engine")
    for config in vars(engine).values() if engine is not None else ():
        for key, value in dict(getattr(config, "terminals", {})).items():
            for literal in (value,) if isinstance(value, str) else value:
                if not _THINKING.search(key) and _TAG.fullmatch(literal.strip()):
                    yield literal.strip()


def _call_tokens(tokenizer: Any) -> Iterator[str]:
    """The tokenizer's own markup for calls: where a parser does not say what it looks for, that tells that a call was meant."""
    for token in tokenizer.added_tokens_decoder.values():
        if _CALLING.search(str(token.content)) and not _THINKING.search(str(token.content)):
            yield str(token.content)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
