"""The form in which a critic writes a correction: one JSON object, and nothing that is not in the form.

    {"keep": 1, "turns": [{"text": "…", "calls": [{"name": "python", "arguments": {"code": "…"}}]},
                          {"text": "The answer is …"}]}

`keep`: so many of the trajectory's own first turns stand as they are. `turns`: what the policy should have written after
them; each but the last makes calls, the last one answers. `thinking` may stand beside `text`. Results are not the critic's
to write: the calls are run.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

_LONGEST = 200_000  # characters; more than a whole context
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)


class Malformed(ValueError):
    """What the critic wrote is not in the form; says where."""


class CorrectedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool's name and its arguments."""

    name: str
    arguments: dict[str, Any]


class CorrectedTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the policy should have written in one turn."""

    text: str = ""
    calls: list[CorrectedCall] = []
    thinking: str = ""


class Correction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trajectory from its turn `keep` on."""

    turns: Annotated[list[CorrectedTurn], msgspec.Meta(min_length=1)]
    keep: Annotated[int, msgspec.Meta(ge=0)] = 0


_decoder = msgspec.json.Decoder(Correction)


def read_correction(written: str) -> Correction:
    """The correction in a critic's answer: the JSON object alone, or in a fenced block; thinking before it is passed over.

    Raises:
        Malformed: anything else.
    """
    if len(written) > _LONGEST:
        raise Malformed(f"{len(written)} characters; at most {_LONGEST} are read")
    text = written.strip()
    if not text.startswith(("{", "```")) and "</think>" in text:
        text = text.partition("</think>")[2].strip()
    if (fenced := _FENCED.fullmatch(text)) is not None:
        text = fenced[1]
    try:
        correction = _decoder.decode(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise Malformed(str(error)) from error
    *before, last = correction.turns
    if last.calls:
        raise Malformed("the last turn makes calls; it must answer")
    if not all(turn.calls for turn in before):
        raise Malformed("a turn before the last makes no call")
    return correction
