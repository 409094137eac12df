"""Reading a call out of JSON that a model wrote: total, and nothing comes out that could not be written down again."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from toolrl.trajectory import CallError

_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class BadCall(Exception):
    """JSON that is not a call; `kind` and the message are the CallError's."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def as_error(self) -> CallError:
        return CallError(self.kind, str(self))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def read_value(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value that starts at `start` (after whitespace) and where it ends. Raises BadCall."""
    begin = _SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches the empty string
    try:
        value, end = _DECODER.raw_decode(text, begin)
        return _clean(value), end
    except json.JSONDecodeError as error:
        raise BadCall("bad_json", f"invalid JSON: {error.msg} at character {error.pos - begin} of the call") from None
    except RecursionError:
        raise BadCall("bad_json", "invalid JSON: nested too deeply") from None
    except ValueError as error:  # NaN, an integer of thousands of digits
        raise BadCall("bad_json", f"invalid JSON: {error}") from None


def read_call(value: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call given as a JSON value. Raises BadCall."""
    if not isinstance(value, dict):
        raise BadCall("not_an_object", f"a call is a JSON object with name and arguments, not a {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise BadCall("missing_name", 'the call has no "name"')
    arguments = value.get("arguments")
    if not isinstance(arguments, dict):
        raise BadCall("bad_arguments", f'"arguments" of {name} must be a JSON object, not {json.dumps(arguments)[:40]}')
    return name, arguments


def _clean(value: Any) -> Any:
    r"""The value with lone surrogates (`"\ud800"` is legal JSON) replaced: no codec could write them."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value) if _SURROGATE.search(value) else value
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value
