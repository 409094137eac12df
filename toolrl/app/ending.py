"""SIGTERM ends a run in order: a scheduler sends it before the time is up, a node before it is taken away.

While the run trains, it ends after the step that it is at, with a checkpoint, or at once where it only waits for a batch.
Before and after, there is nothing to keep, and it ends at once. A second SIGTERM does not wait for the step; nothing cuts short
how a run takes away what it started. Either way nothing of the run is left behind, it says how to go on, and its exit code is 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

from toolrl.app.pausing import Pausing


class Ending:
    """A context manager inside the run's own task."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._pausing: Pausing | None = None
        self._told = 0
        self._ends_now = False

    def __enter__(self) -> Ending:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._before = signal.getsignal(signal.SIGTERM)
        self._loop.add_signal_handler(signal.SIGTERM, self._tell)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._before)
        if not self._ends_now or not isinstance(value, asyncio.CancelledError) or self._task is None:
            return False
        self._task.uncancel()
        return True

    def in_training(self, pausing: Pausing | None) -> None:
        """From now on there are steps to finish first; None: no longer."""
        self._pausing = pausing

    def _tell(self) -> None:
        self._told += 1
        if self._pausing is not None and self._told == 1:
            self._say("SIGTERM: the run ends after the step that it is at, with a checkpoint")
            self._pausing.stop()
        elif self._task is not None and not self._ends_now:
            self._ends_now = True
            self._say("SIGTERM: the run ends now; `toolrl train RUN --resume` goes on at its last checkpoint")
            self._task.cancel()


@contextlib.contextmanager
def keeping_our_handler() -> Iterator[None]:
    """Ray sets a handler of its own when it starts, which ends the process at once: ours, if there is one, comes back."""
    ours = signal.getsignal(signal.SIGTERM)
    yield
    if callable(ours):
        signal.signal(signal.SIGTERM, ours)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Around what comes before a run's own `Ending`, imports above all: SIGTERM ends the process with exit code 0."""

    def end(number: int, frame: FrameType | None) -> None:
        print("SIGTERM: the run is not under way; nothing to keep", flush=True)
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
