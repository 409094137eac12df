"""One closed set of outcomes, obeyed by the buffer's refill, by advantages, by metrics and by what people are shown."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from actors.replay import ReplaySettings, ReplayStore
from tests.replay_samples import sample
from toolrl.algorithms.groups import group_advantages
from toolrl.app.viewer.outcome_table import fate, outcome_line, outcome_table
from toolrl.app.viewer.screen import Seen, screen
from toolrl.monitors import batch_metrics
from toolrl.monitors.outcomes import StepOutcomes
from toolrl.trajectory import Outcome


@pytest.fixture
def store(tmp_path: Path) -> ReplayStore:
    return ReplayStore(tmp_path / "r.db", ReplaySettings(group_size=4, batch_groups=1, max_staleness=0))


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_part_agrees_on_what_becomes_of_an_outcome(store: ReplayStore, outcome: Outcome) -> None:
    counted = StepOutcomes(store.ledger())
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    odd = sample(ticket.group_id, 0, outcome=outcome, reward=5.0)
    others = [sample(ticket.group_id, index) for index in (1, 2, 3)]
    store.put("w0", [odd, *others])
    ledger = store.ledger()
    metrics = counted.since_last(ledger)
    assert metrics[f"ended/{outcome.value}"] == 1.0 + (outcome is Outcome.ANSWERED) * 3
    advantages = group_advantages("grpo", [odd, *others])
    alone = group_advantages("grpo", others)
    means = batch_metrics([odd, *others], learner_version=0)
    if outcome.trained:
        assert (fate(outcome), ledger.ready, ledger.reissued, ledger.dropped) == ("trained", 4, {}, {})
        assert advantages[0][0] > 0
        assert advantages[1:] != alone
        assert means["reward/mean"] == pytest.approx((5 + 1 + 0 + 1) / 4)
        return
    assert advantages == [[0.0], *alone], "not in its group's statistics"
    assert means["reward/mean"] == pytest.approx(2 / 3)
    if outcome.reissued:
        assert (fate(outcome), ledger.reissued, ledger.dropped) == ("re-issued", {outcome.value: 1}, {})
        assert metrics[f"samples/reissued/{outcome.value}"] == metrics["samples/reissued"] == 1.0
        again = store.lease_ticket("w0")
        assert again is not None
        assert again.samples_missing == [0], "its place is filled again"
    else:
        assert (fate(outcome), ledger.reissued, ledger.dropped) == ("not trained", {}, {outcome.value: 1})
        assert metrics[f"samples/dropped/{outcome.value}"] == metrics["samples/dropped"] == 1.0
        assert ledger.ready == 3, "the group goes on without it"


def test_a_step_counts_what_happened_since_the_last_one(store: ReplayStore) -> None:
    counted = StepOutcomes(store.ledger())
    for step in (1, 2):
        ticket = store.lease_ticket("w0")
        assert ticket is not None
        store.put("w0", [sample(ticket.group_id, i, versions=(step - 1, step - 1)) for i in range(4)])
        batch = store.lease_batch("learner", 1, step - 1)
        assert batch is not None
        store.ack(batch.batch_id, step, step)
        store.set_version(step)
        metrics = counted.since_last(store.ledger())
        assert (metrics["ended/answered"], metrics["samples/trained"], metrics["samples/reissued"]) == (4.0, 4.0, 0.0)
    assert set(metrics) >= {f"ended/{outcome.value}" for outcome in Outcome}


ROW = {
    "ended/answered": 60.0,
    "ended/length": 3.0,
    "ended/infra_error": 1.0,
    "ended/reward_missing": 2.0,
    "ended/stale": 0.0,
    "samples/trained": 64.0,
    "samples/reissued/infra_error": 1.0,
    "samples/dropped/uniform": 8.0,
}


def test_people_see_outcomes_with_what_becomes_of_them() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(outcome_table(ROW))
    rows = [line.split("│")[1:-1] for line in console.file.getvalue().splitlines() if "│" in line]  # type: ignore[attr-defined]
    assert ["answered", "60", "90.9%", "trained"] in [[cell.strip() for cell in row] for row in rows]
    assert ["infra_error", "1", "1.5%", "re-issued"] in [[cell.strip() for cell in row] for row in rows]
    assert ["reward_missing", "2", "3.0%", "not trained"] in [[cell.strip() for cell in row] for row in rows]
    assert ["samples dropped", "8", "", "uniform"] in [[cell.strip() for cell in row] for row in rows]
    assert not any("stale" in cell for row in rows for cell in row)
    assert outcome_line(ROW) == (
        "ended: answered 60, length 3 (trained); reward_missing 2 (not trained); infra_error 1 (re-issued)"
        " · reissued: infra_error 1 · dropped: uniform 8"
    )
    seen = Seen("seen", steps=2)
    seen.add(1, ROW, 1.0)
    console.print(screen(seen))
    assert "ended: answered 60, length 3 (trained)" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_without_such_metrics_shows_no_table() -> None:
    assert outcome_table({"reward/mean": 1.0}) is None
    assert outcome_line({}) == ""
