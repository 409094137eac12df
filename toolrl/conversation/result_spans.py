"""Which of a trajectory's tokens are the text of which call's results.

A tool turn is the template's text around the results' texts. Rendered once more with a result's text left out, it agrees with
what was recorded up to where that text begins and from where it ends: what lies between is the result. Nothing is searched
for in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toolrl.conversation.chat_format import ChatFormat
from toolrl.trajectory import ToolResult, Trajectory, Turn

Spans = list[tuple[int, int]]  # [start, end) of response tokens


def result_spans(chat: ChatFormat, trajectory: Trajectory) -> list[Spans]:
    """[n_policy_turns] where the results of each policy turn's own calls stand, whenever they came; receipts left out."""
    owners = {id(result): turn for turn, results in enumerate(trajectory.results_of_turns()) for result in results}
    found: list[Spans] = [[] for _ in trajectory.policy_turns]
    at, asked = 0, None
    for turn in trajectory.turns:
        if turn.kind == "policy":
            asked = turn
        elif asked is not None:
            for index, result in enumerate(turn.results):
                start, end = _span(chat, asked, turn, index)
                if id(result) in owners and start < end:
                    found[owners[id(result)]].append((at + start, at + end))
        at += len(turn.token_ids)
    return found


def _span(chat: ChatFormat, asked: Turn, shown: Turn, index: int) -> tuple[int, int]:
    """[start, end) of one result among the tool turn's tokens."""
    without: list[ToolResult] = [
        replace(result, text="" if place == index else result.text) for place, result in enumerate(shown.results)
    ]
    empty = chat.observation_ids(asked, without)
    start = _common(shown.token_ids, empty)
    rest = _common(shown.token_ids[start:][::-1], empty[start:][::-1])
    return start, len(shown.token_ids) - rest


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
