"""Provenance: what a call's result showed that was not known before, and how much of it the policy wrote later.

A value is a number or a word. It counts for a call when
- a result with status `ok` shows it,
- it stood nowhere before: not in the prompt, not in the call's own arguments, not in anything that the policy had
  written or a tool had shown,
- it is not trivial: 0, 1, single characters, True, False, None and the commonest words are found everywhere.
It is used when it stands in a policy turn after the one in which the result was shown. The `use` of a call is the share of
its values that are used, so a result that shows a hundred numbers proves little when one of them turns up. A call that
showed nothing but bound a name that the code of a used call reads was of as much use as that call.

What this cannot see: a value that is used without being written (a `True` that becomes a "yes"), and a known value that
the code puts together from pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal

from toolrl.rewards.working_code import names_of
from toolrl.trajectory import ToolCall, Trajectory, Turn

_TOKEN = re.compile(
    r"(?<!\w)(?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d[\d_]*)(?P<fraction>\.\d+)?(?P<exponent>[eE][+-]?\d{1,2}(?!\d))?"
    r"|[^\W\d_]\w*"
)
_TRUTH_VALUES = frozenset({"true", "false", "none", "null", "nan", "inf"})
# Found in any text, and what the tools themselves say around a result.
_COMMON = frozenset((
    "the", "and", "for", "are", "was", "has", "have", "not", "but", "you", "this", "that", "with", "from", "into", "then",
    "of", "is", "in", "to", "be", "or", "as", "at", "by", "an", "it", "so", "on", "if", "no",
    "output", "result", "results", "value", "values", "call", "error", "answer", "print",
))  # fmt: skip
_LONGEST_ROUNDED = 60  # digits
_ROUNDING = Context(prec=_LONGEST_ROUNDED, rounding=ROUND_HALF_UP)


@dataclass(frozen=True, slots=True)
class CallUse:
    """What became of one call that was carried out."""

    turn: int  # index of the policy turn that called
    call: ToolCall
    shown: frozenset[str]  # the values that count
    use: float  # 0 to 1


def uses_of_calls(trajectory: Trajectory, known: Iterable[str] = (), *, trivial: bool = False) -> list[CallUse]:
    """Every call that came back `ok`, in the order of the results.

    Args:
        known: further texts that were there before the episode, such as the prompt's.
        trivial: let numbers of one digit and truth values count too, for who has other evidence beside.
    """
    written = [_values(_text_of(turn)) for turn in trajectory.policy_turns]
    later: list[set[str]] = [set()]  # by policy turn: what it and those after it hold
    for values in reversed(written):
        later.insert(0, values | later[0])
    seen = set().union(*(_values(text) for text in known))
    calls: dict[str, tuple[int, ToolCall]] = {}
    found: list[CallUse] = []
    index = 0  # policy turns so far
    for turn in trajectory.turns:
        if turn.kind == "policy":
            seen |= written[index]
            calls.update({call.id: (index, call) for call in turn.calls})
            index += 1
            continue
        for result in turn.results:
            if result.status != "ok" or result.call_id not in calls:
                continue
            caller, call = calls[result.call_id]
            values = _values(result.text) - {result.call_id.casefold()}  # which a late result names
            shown = frozenset(value for value in values - seen if _counts(value, trivial))
            used = [value for value in shown if _stands_in(value, later[index], seen, trivial)]
            found.append(CallUse(caller, call, shown, len(used) / len(shown) if shown else 0.0))
            seen |= values
    return _with_effects(found)


def _with_effects(calls: list[CallUse]) -> list[CallUse]:
    """The same calls; one whose names a used call reads is of as much use as that one."""
    needed: dict[str, float] = {}
    found = []
    for each in reversed(calls):
        names = names_of(each.call.arguments.get("code"))
        use = max([each.use, *(needed.pop(name, 0.0) for name in names.bound)])
        if use:
            needed.update({name: max(use, needed.get(name, 0.0)) for name in names.read})
        found.append(CallUse(each.turn, each.call, each.shown, use))
    return found[::-1]


def _text_of(turn: Turn) -> str:
    """Everything that the policy wrote in a turn, with its arguments as the tool receives them."""
    return "\n".join([turn.text, *(json.dumps(call.arguments, ensure_ascii=False) for call in turn.calls)])


def _values(text: str) -> set[str]:
    """Numbers without sign, separators and needless zeros, words in lower case."""
    return {_number(found) if found["whole"] else found.group().casefold() for found in _TOKEN.finditer(text)}


def _number(found: re.Match[str]) -> str:
    return _plain(Decimal(found.group().replace(",", "").replace("_", "")))


def _plain(number: Decimal) -> str:
    """Without exponent and needless zeros."""
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _counts(value: str, trivial: bool) -> bool:
    if trivial:
        return value not in _COMMON
    return len(value) > 1 and value not in _TRUTH_VALUES and value not in _COMMON


def _stands_in(value: str, written: set[str], seen: set[str], trivial: bool) -> bool:
    """Whether it was written, as it is or rounded to three or more digits."""
    if value in written:
        return True
    whole, _, fraction = value.partition(".")
    if not whole.isdecimal() or len(value) > _LONGEST_ROUNDED:
        return False
    for places in range(len(fraction) - 1, -1, -1):
        rounded = _plain(Decimal(value).quantize(Decimal((0, (1,), -places)), context=_ROUNDING))
        if len(rounded.replace(".", "").lstrip("0")) < 3:
            return False
        if rounded in written and rounded not in seen and _counts(rounded, trivial):
            return True
    return False
