"""A latency with a heavy tail, for tools that are to be as slow as a remote service."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolrl.errors import UserError

_Z99 = 2.3263478740408408  # 99 % of a standard normal lie below


@dataclass(frozen=True)
class HeavyTail:
    """A log-normal distribution of seconds, given by its mean and its 99th percentile.

    ln mean = μ + σ²/2 and ln p99 = μ + z·σ, so σ = z − √(z² − 2·ln(p99/mean)).

    Raises:
        UserError: the two do not belong to one such distribution (p99/mean is between 1 and e^(z²/2) ≈ 14.9).
    """

    mean_s: float
    p99_s: float
    _mu: float = field(init=False, repr=False)
    _sigma: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.mean_s <= self.p99_s < math.inf:
            raise UserError(f"latency: 0 < mean_s <= p99_s is needed, not mean_s={self.mean_s}, p99_s={self.p99_s}")
        root = _Z99**2 - 2 * math.log(self.p99_s / self.mean_s)
        if root < 0:
            largest = self.mean_s * math.exp(_Z99**2 / 2)
            raise UserError(f"latency: p99_s={self.p99_s} is too far from mean_s={self.mean_s}; at most {largest:.3g}")
        sigma = _Z99 - math.sqrt(root)
        object.__setattr__(self, "_sigma", sigma)
        object.__setattr__(self, "_mu", math.log(self.mean_s) - sigma**2 / 2)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> HeavyTail:
        """From `{mean_s, p99_s}` in a config."""
        if set(options) != {"mean_s", "p99_s"}:
            raise UserError(f"latency: needs mean_s and p99_s, got {', '.join(options) or 'nothing'}")
        return cls(float(options["mean_s"]), float(options["p99_s"]))

    def draw(self, key: str) -> float:
        """Seconds; the same for the same key, on every machine."""
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
        return random.Random(seed).lognormvariate(self._mu, self._sigma)
