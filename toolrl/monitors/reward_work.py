"""What is done for rewards that come late, as metrics: continuations that the rollout workers play, and the reward workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_COUNTED = ("continuations", "continuation_tokens", "continuations_unscored")


def continuation_metrics(workers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of `monte_carlo`, from the statistics of the rollout workers, since each began; nothing without that reward."""
    measuring = [each for each in workers if _COUNTED[0] in each]
    return {f"monte_carlo/{name}": float(sum(each[name] for each in measuring)) for name in _COUNTED if measuring}
