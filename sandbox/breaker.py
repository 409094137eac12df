"""Circuit breaker of a pool: creation that keeps failing is not tried again for a while."""

from __future__ import annotations

import time


class Breaker:
    """Counts failures in a row. After `threshold` of them it is open for `cooldown_s`."""

    def __init__(self, threshold: int, cooldown_s: float) -> None:
        self._threshold, self._cooldown_s = threshold, cooldown_s
        self._in_row = 0
        self._open_until = 0.0
        self.last_failure = ""

    @property
    def open(self) -> bool:
        """Whether trying is pointless for now."""
        return time.monotonic() < self._open_until

    def succeeded(self) -> None:
        """Forget the failures."""
        self._in_row, self._open_until, self.last_failure = 0, 0.0, ""

    def failed(self, why: str) -> float:
        """Count a failure; returns after how many seconds to try again (doubling until the breaker opens)."""
        self._in_row += 1
        self.last_failure = why
        if self._in_row < self._threshold:
            return float(0.1 * 2**self._in_row)
        self._open_until = time.monotonic() + self._cooldown_s
        return self._cooldown_s
