"""What a rank does right now, for whoever waits for it and wants to know where it hangs."""

from __future__ import annotations

import time
from typing import Any


class Activity:
    """The phase a rank is in, how often it has finished something, and since when it has finished nothing."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._now = ("ready", 0, time.monotonic())  # replaced as a whole: another thread reads it

    def note(self, phase: str) -> None:
        """A piece of `phase` was finished, or the phase begins."""
        self._now = (phase, self._now[1] + 1, time.monotonic())

    def progress(self) -> dict[str, Any]:
        phase, finished, since = self._now
        return {"rank": self._rank, "phase": phase, "finished": finished, "silent_s": time.monotonic() - since}
