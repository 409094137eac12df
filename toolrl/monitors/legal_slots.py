"""Where a control token may stand in a policy turn, and where the policy decides what the turn becomes. Read from recorded
token ids and turns.

A turn is a walk through stretches of text, thought and call, which control tokens open and close:

| token | legal |
|---|---|
| opens a call | at a decision point; at the start of a line of text; where a call was opened that is closed and not empty |
| closes a call | where a call that is not empty was closed, and on the whitespace before it |
| opens a thought | at a decision point |
| closes a thought | anywhere in the thought |
| ends the turn | anywhere in text once something was said or called; in a call only of a format that does not close its calls |
| stands in calls, or in text | anywhere there |
| any other (`<|im_start|>`, `<tool_response>`) | nowhere |

**Decision points**: the first token of the turn that is no whitespace, the same after a thought and after a call, and where a
call was opened that is closed and not empty.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from toolrl.monitors.control_tokens import ControlTokens

_TEXT, _THOUGHT, _CALL = "text", "thought", "call"
_LOOK_BACK = 8  # tokens of whitespace between `<think>` in a prompt and what is sampled


class Slots(NamedTuple):
    """Of n sampled tokens in order: the distribution that each was drawn from."""

    legal: np.ndarray  # [n, C] bool
    decisions: np.ndarray  # [n] bool


def sequence_slots(
    control: ControlTokens, token_ids: np.ndarray, prompt_length: int, policy_mask: np.ndarray, turn_ids: np.ndarray
) -> Slots:
    """Of the policy tokens of a sequence, over all its turns.

    Args:
        token_ids: [T], the prompt's `prompt_length` first.
        policy_mask, turn_ids: [R] of the response, as the turns were recorded.
    """
    places = prompt_length + np.flatnonzero(policy_mask)
    starts = np.flatnonzero(np.diff(turn_ids[policy_mask], prepend=-2)).tolist()
    walk = _Walk(control, token_ids[places])
    for begin, end in pairwise([*starts, len(places)]):
        walk.over_turn(begin, end, in_thought=_opened(control, token_ids, int(places[begin])))
    return Slots(walk.legal, walk.decisions)


def turn_slots(control: ControlTokens, tokens: np.ndarray, in_thought: bool = False) -> Slots:
    """Of one policy turn of n tokens.

    Args:
        in_thought: the prompt had opened a thought.
    """
    walk = _Walk(control, tokens)
    walk.over_turn(0, len(tokens), in_thought)
    return Slots(walk.legal, walk.decisions)


class _Stretch(NamedTuple):
    """Positions [begin, end); the token that ends it is drawn in it, so it stands at its end."""

    kind: str
    begin: int
    end: int


class _Walk:
    """The slots of a sequence while they are filled in, turn by turn. What is asked of every token is worked out at once."""

    def __init__(self, control: ControlTokens, tokens: np.ndarray) -> None:
        self.control = control
        self.kinds = control.kinds(tokens)
        self.controls = np.flatnonzero(self.kinds >= 0).tolist()
        self.blank = control.marked(control.blank, tokens)
        self.next_word = _next(~self.blank & (self.kinds < 0))
        self.next_visible = _next(~self.blank)
        self.line_ended = np.concatenate([[False], control.marked(control.ends_line, tokens)])[: len(tokens)]
        self.legal = np.zeros((len(tokens), len(control.ids)), dtype=bool)
        self.decisions = np.zeros(len(tokens), dtype=bool)

    def over_turn(self, begin: int, end: int, in_thought: bool) -> None:
        said = False
        stretches = self._stretches(begin, end, in_thought)
        for stretch, then in zip(stretches, [*stretches[1:], None], strict=True):
            if stretch.kind == _THOUGHT:
                self._allow(self.control.closes_thought, stretch.begin, stretch.end)
            elif stretch.kind == _CALL:
                said |= self._fill_call(stretch)
            else:
                opens_whole_call = then is not None and then.kind == _CALL and self._is_whole(then)
                said |= self._fill_text(stretch, said, opens_whole_call)

    def _stretches(self, begin: int, end: int, in_thought: bool) -> list[_Stretch]:
        """The whole turn; a stretch may be empty."""
        control = self.control
        after = {
            (_TEXT, control.opens_thought): _THOUGHT,
            (_TEXT, control.opens_call): _CALL,
            (_CALL, control.closes_call): _TEXT,
            (_THOUGHT, control.closes_thought): _TEXT,
            (_TEXT, control.closes_thought): _TEXT,  # what stood before it was a thought, as parsers read it
        }
        found, kind = [], _THOUGHT if in_thought else _TEXT
        for at in self.controls[bisect_left(self.controls, begin) : bisect_left(self.controls, end)]:
            now = after.get((kind, int(self.kinds[at])))
            if now is not None:
                found.append(_Stretch(kind, begin, at + 1))
                kind, begin = now, at + 1
        return [*found, _Stretch(kind, begin, end)]

    def _allow(self, token: int, begin: int, end: int) -> None:
        if token >= 0:
            self.legal[begin:end, token] = True

    def _is_whole(self, call: _Stretch) -> bool:
        """Closed, where the format closes its calls, and not empty."""
        closes = self.control.closes_call
        closed = closes < 0 or (call.end > call.begin and self.kinds[call.end - 1] == closes)
        return bool(closed and self.next_word[call.begin] < call.end)

    def _fill_call(self, call: _Stretch) -> bool:
        """Returns whether a call was made."""
        control, whole = self.control, self._is_whole(call)
        for token in control.in_call:
            self._allow(token, call.begin, call.end)
        if control.closes_call < 0:
            for token in control.ends:
                self._allow(token, int(self.next_word[call.begin]) + 1, call.end)
        elif whole:
            begin = call.end - 1
            while begin > call.begin and self.blank[begin - 1]:
                begin -= 1
            self._allow(control.closes_call, begin, call.end)
        return whole

    def _fill_text(self, text: _Stretch, said: bool, opens_whole_call: bool) -> bool:
        """Returns whether the turn has said something by its end."""
        control, first_word = self.control, int(self.next_word[text.begin])
        decision = int(self.next_visible[text.begin])
        beginning = min(decision + 1, text.end)  # the decision and the whitespace before it
        if decision < text.end:
            self.decisions[decision] = True
        self._allow(control.opens_thought, text.begin, beginning)
        self._allow(control.opens_call, text.begin, beginning)
        if control.opens_call >= 0:
            later = slice(text.begin + 1, text.end)
            self.legal[later, control.opens_call] |= self.line_ended[later]
        if opens_whole_call:
            self._allow(control.opens_call, text.end - 1, text.end)
            self.decisions[text.end - 1] = True
        for token in control.in_text:
            self._allow(token, text.begin, text.end)
        for token in control.ends:
            self._allow(token, text.begin if said else first_word + 1, text.end)
        return said or first_word < text.end


def _next(marks: np.ndarray) -> np.ndarray:
    """[n + 1] the first marked position from each one on, n where there is none."""
    places = np.where(marks, np.arange(len(marks)), len(marks))
    return np.append(np.minimum.accumulate(places[::-1])[::-1], len(marks))


def _opened(control: ControlTokens, token_ids: np.ndarray, first: int) -> bool:
    """Whether what stands before position `first` ends in an opened thought."""
    if control.opens_thought < 0:
        return False
    at = first - 1
    while at > first - _LOOK_BACK and at > 0 and token_ids[at] < len(control.blank) and control.blank[token_ids[at]]:
        at -= 1
    return at >= 0 and int(token_ids[at]) == int(control.ids[control.opens_thought])
