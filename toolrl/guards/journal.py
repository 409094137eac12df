"""What the guards of a run saw and did: `guards.jsonl`, one object a line, in the order in which it happened.

    {"step": 12, "kind": "seen", "rule": …, "action": …, "metric": …, "condition": …, "evidence": {…}}   a rule fired
    {"step": 12, "kind": "done", "rule": …, "action": …, …}                    what its action changed or ordered
    {"step": 17, "kind": "came_of_it", "rule": …, "fired_at": 12, "before": …, "after": …, "is_gone": …}
    {"step": 19, "kind": "ended", "rule": …, "what": "trouble" | "action", …}  the metric is back; the action's effect is over

Invariants:
- Each line is whole: a line that a killed run left half-written is cut off when the file is opened again.
- A resumed run writes the steps after its checkpoint again, so it forgets them first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

FILE = "guards.jsonl"
Kind = Literal["seen", "done", "came_of_it", "ended"]


class Journal:
    """Writer of one run's journal. A line is with the operating system when `write` returns."""

    def __init__(self, run_dir: str | Path, *, resumed_at: int | None = None) -> None:
        """Opens or continues the journal.

        Args:
            resumed_at: the step of the checkpoint that the run goes on from; later steps are forgotten.
        """
        self.path = Path(run_dir) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [each for each in read_journal(run_dir) if resumed_at is None or each["step"] <= resumed_at]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(_line(entry) for entry in kept), encoding="utf-8")
        partial.replace(self.path)

    def write(self, step: int, kind: Kind, **what: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line({"step": step, "kind": kind, **what}))


def read_journal(run_dir: str | Path) -> list[dict[str, Any]]:
    """Every whole line, also while the run goes on; empty where no guard has spoken."""
    path = Path(run_dir) / FILE
    if not path.is_file():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(_finite(dict(entry)), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
