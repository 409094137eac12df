"""What the model is told about calls that take their time; nowhere else."""

from __future__ import annotations

from typing import Literal


def timed_out(name: str, after_s: float) -> str:
    """The result of a call that passed its limit."""
    return f"Error: {name} did not finish within {after_s:g} s"


def receipt(call_id: str, name: str) -> str:
    """What a deferred call returns at once."""
    return f"{call_id}: {name} is running; its result will come later under this id."


def late(call_id: str, text: str, cut: Literal["head", "tail", "middle"]) -> str:
    """A deferred call's result, with its id at the end that is never cut away."""
    return f"{text}\nThis was the result of {call_id}." if cut == "head" else f"Result of {call_id}:\n{text}"
