"""A run's metrics on disk: `metrics.jsonl`, one object a step, and TensorBoard's event files in `tensorboard/`.

Invariants:
- Each line is whole: a line that a killed run left half-written is cut off when the file is opened again.
- Steps ascend. Writing a step that is there already (a resumed run repeats those after its checkpoint) removes it and
  everything after it first, and TensorBoard is told to forget them too.
- JSON knows no NaN and no infinity: they are written as null and read as NaN.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"
_FIRST = ("step", "version", "time_s")


class MetricsLog:
    """Writer of one run's metrics; a context manager."""

    def __init__(self, run_dir: str | Path, *, tensorboard: bool = True) -> None:
        """Opens or continues the log in `run_dir`. TensorBoard files are written where that package is installed."""
        self.path = Path(run_dir) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._steps = _cut_broken_tail(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._events: Any = None
        if tensorboard and importlib.util.find_spec("tensorboard") is not None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._events = EventFileWriter(str(Path(run_dir) / TENSORBOARD))

    def write(self, step: int, version: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """Appends a step. On return the line is with the operating system: a killed process does not lose it."""
        repeated = [offset for known, offset in self._steps if known >= step]
        if repeated:
            self._file.truncate(repeated[0])
            self._steps = [(known, offset) for known, offset in self._steps if known < step]
            self._forget_from(step)
        row: dict[str, float | None] = {"step": step, "version": version, "time_s": time_s}
        row |= {name: _number(value) for name, value in sorted(metrics.items()) if name not in _FIRST}
        self._steps.append((step, os.fstat(self._file.fileno()).st_size))
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        self._write_events(step, row)

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_events(self, step: int, row: Mapping[str, Any]) -> None:
        if self._events is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if value is not None and name != "step"
        ]
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._events.flush()

    def _forget_from(self, step: int) -> None:
        """TensorBoard drops events of steps at or above that of a session's start."""
        if self._events is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._events.add_event(Event(wall_time=time.time(), step=step, session_log=start))


def read_metrics(run_dir: str | Path) -> list[dict[str, float]]:
    """Every whole step of a run, also while it goes on; empty before the first."""
    path = Path(run_dir) / FILE
    if not path.is_file():
        return []
    return [
        {name: math.nan if value is None else value for name, value in row.items()} for row, _, _ in _whole_rows(path)
    ]


def _whole_rows(path: Path) -> Iterator[tuple[dict[str, Any], int, int]]:
    """(row, its first byte, the byte after it), up to the first line that is not whole."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError:
                return
            yield row, offset, offset + len(line)
            offset += len(line)


def _cut_broken_tail(path: Path) -> list[tuple[int, int]]:
    """(step, offset) of every whole line, after cutting off what follows them."""
    if not path.is_file():
        return []
    rows = list(_whole_rows(path))
    end = rows[-1][2] if rows else 0
    if end < path.stat().st_size:
        os.truncate(path, end)
    return [(row["step"], offset) for row, offset, _ in rows]


def _number(value: float) -> float | int | None:
    if isinstance(value, int):
        return int(value)
    return float(value) if math.isfinite(value) else None
