"""How the trajectories of a step ended and what that makes of them, from its metrics (`toolrl.monitors.outcomes`)."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from toolrl.trajectory import Outcome

_SAMPLES = ("reissued", "dropped")


def fate(outcome: Outcome) -> str:
    """What becomes of a trajectory that ends so."""
    if outcome.trained:
        return "trained"
    return "re-issued" if outcome.reissued else "not trained"


def outcome_table(metrics: Mapping[str, float]) -> Table | None:
    """A row for every outcome that occurred, then samples that were thrown away by reason; None without such metrics."""
    ended = _ended(metrics)
    if not ended:
        return None
    total = sum(ended.values())
    table = Table("outcome", "trajectories", "share", "what becomes of them", title="Ended since the last step")
    table.title_justify = "left"
    for column in table.columns[1:3]:
        column.justify = "right"
    for outcome in Outcome:
        if count := ended.get(outcome):
            table.add_row(outcome.value, f"{count:.0f}", f"{count / total:.1%}", fate(outcome))
    table.add_section()
    table.add_row("samples trained", f"{metrics.get('samples/trained', 0.0):.0f}", "", "")
    for name in _SAMPLES:
        for reason, count in _reasons(metrics, name).items():
            table.add_row(f"samples {name}", f"{count:.0f}", "", reason)
    return table


def outcome_line(metrics: Mapping[str, float]) -> str:
    """The same in one line: `ended: answered 60, length 3 (trained); stale 1 (re-issued) · dropped: uniform 8`."""
    ended = _ended(metrics)
    if not ended:
        return ""
    by_fate: dict[str, list[str]] = {}
    for outcome in Outcome:
        if count := ended.get(outcome):
            by_fate.setdefault(fate(outcome), []).append(f"{outcome.value} {count:.0f}")
    parts = ["ended: " + "; ".join(f"{', '.join(found)} ({what})" for what, found in by_fate.items())]
    for name in _SAMPLES:
        if reasons := _reasons(metrics, name):
            parts.append(f"{name}: " + ", ".join(f"{reason} {count:.0f}" for reason, count in reasons.items()))
    return " · ".join(parts)


def _ended(metrics: Mapping[str, float]) -> dict[Outcome, float]:
    return {outcome: n for outcome in Outcome if (n := metrics.get(f"ended/{outcome.value}", 0.0)) > 0}


def _reasons(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    prefix = f"samples/{name}/"
    return {key.removeprefix(prefix): n for key, n in metrics.items() if key.startswith(prefix) and n > 0}
