"""How trajectories ended and what became of samples in one step, from the ledger's counts before and after it.

A batch holds what is trained and nothing else; what was thrown away, tried again or given up shows in the ledger alone.
A rollback takes samples out of `trained`; counts of a step are then made from the ledger after it.
"""

from __future__ import annotations

from toolrl.ledger import Ledger
from toolrl.trajectory import Outcome


class StepOutcomes:
    """Made when training begins (or goes on); `since_last` is asked once a step."""

    def __init__(self, ledger: Ledger) -> None:
        self._before = ledger

    def uniform_groups(self, ledger: Ledger, group_size: int) -> int:
        """Groups that the buffer dropped since the last step because their rewards had no spread; to be asked before
        `since_last`."""
        dropped = ledger.dropped.get("uniform", 0) - self._before.dropped.get("uniform", 0)
        return max(0, round(dropped / group_size))

    def since_last(self, ledger: Ledger) -> dict[str, float]:
        """Counts since the last time.

        `ended/OUTCOME`: trajectories that were taken in and ended so; a closed set, 0 where there was none.
        `samples/trained`, `samples/dropped`, `samples/reissued`, the last two also by reason: what became of samples.
        `samples/late_rewards/STATUS`: what became of rewards that were delivered.
        """
        before, self._before = self._before, ledger
        ended = _more(ledger.outcomes, before.outcomes)
        counts = {f"ended/{outcome.value}": ended.get(outcome.value, 0) for outcome in Outcome}
        counts["samples/trained"] = ledger.trained - before.trained
        for name, now, then in (
            ("dropped", ledger.dropped, before.dropped),
            ("reissued", ledger.reissued, before.reissued),
        ):
            more = _more(now, then)
            counts[f"samples/{name}"] = sum(more.values())
            counts |= {f"samples/{name}/{reason}": n for reason, n in sorted(more.items())}
        late = _more(ledger.late_rewards, before.late_rewards)
        counts |= {f"samples/late_rewards/{status}": n for status, n in sorted(late.items())}
        return {name: float(n) for name, n in counts.items()}


def _more(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: n - before.get(name, 0) for name, n in now.items() if n != before.get(name, 0)}
