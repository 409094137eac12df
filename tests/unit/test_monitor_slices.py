"""Metrics of a batch by task family, difficulty and side, on batches whose numbers are plain to see."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolrl import toolcalls
from toolrl.ledger import Ledger
from toolrl.monitors import batch_metrics
from toolrl.monitors.known_metrics import known
from toolrl.monitors.outcomes import StepOutcomes
from toolrl.supervision.guidance import note_guide
from toolrl.trajectory import Outcome, ToolCall, Trajectory, Turn

HERMES = toolcalls.get("hermes")


def played(task: str, right: float, calls: int, *, family: str = "gcd", **rewards: float) -> Trajectory:
    made = [ToolCall(f"call_{index}", "python", {"code": "1"}) for index in range(calls)]
    turn = Turn("policy", [7, 8], [-1.0, -1.0], [3, 3], "stop", "x", made)
    return Trajectory(
        f"{task}/{right}/{calls}",
        task,
        task,
        0,
        [1],
        [turn],
        outcome=Outcome.ANSWERED,
        rewards={"outcome": right, **rewards},
        metadata={"family": family},
    )


def metrics_of(*batch: Trajectory, **options: object) -> dict[str, float]:
    return batch_metrics(batch, learner_version=3, **options)  # type: ignore[arg-type]


def test_tool_use_and_solve_rate_by_family() -> None:
    metrics = metrics_of(
        played("a", 1, 2),
        played("a", 0, 0),
        played("b", 1, 1),
        played("c", 0, 0, family="sum"),
        played("c", 1, 0, family="sum"),
    )
    assert metrics["tool/call_rate/family/gcd"] == pytest.approx(2 / 3)
    assert metrics["tool/calls_per_trajectory/family/gcd"] == 1.0
    assert metrics["tool/call_rate/family/sum"] == metrics["tool/calls_per_trajectory/family/sum"] == 0.0
    assert (metrics["solve_rate/family/gcd"], metrics["solve_rate/family/sum"]) == (pytest.approx(2 / 3), 0.5)
    assert metrics["solve_rate/with_calls/family/gcd"] == 1.0
    assert metrics["solve_rate/without_calls/family/gcd"] == 0.0
    assert "solve_rate/with_calls/family/sum" not in metrics


def test_difficulty_is_what_the_batch_itself_solved_of_the_task() -> None:
    easy = [played("easy", right, 0) for right in (1, 1, 1, 0)]
    medium = [played("medium", right, 1) for right in (1, 1, 0)]  # exactly two thirds
    hard = [played("hard", right, calls) for right, calls in ((0, 3), (0, 1), (0, 0), (1, 0))]
    metrics = metrics_of(*easy, *medium, *hard)
    assert metrics["tool/call_rate/difficulty/easy"] == 0.0
    assert metrics["tool/call_rate/difficulty/medium"] == 1.0
    assert metrics["tool/call_rate/difficulty/hard"] == 0.5
    assert metrics["tool/calls_per_trajectory/difficulty/hard"] == 1.0


def test_a_partly_right_answer_is_not_solved_and_weights_do_not_matter() -> None:
    batch = (played("a", 2.0, 1), played("a", 1.0, 0), played("b", 0.02, 0))
    metrics = metrics_of(*batch, outcome_weight=2.0)
    assert metrics["solve_rate"] == pytest.approx(1 / 3)
    assert metrics["reward/mean"] == pytest.approx(3.02 / 3)


def test_spread_and_gap_of_rewards_with_and_without_calls() -> None:
    metrics = metrics_of(played("a", 1, 1), played("a", 0, 1), played("b", 1, 0), played("b", 1, 0))
    assert (metrics["reward/std/with_calls"], metrics["reward/std/without_calls"]) == (0.5, 0.0)
    assert metrics["reward/gap_calls"] == -0.5
    assert "reward/gap_calls" not in metrics_of(played("a", 1, 1))


def test_interaction_evidence_compares_on_the_same_task_only() -> None:
    helped = [played("a", 1, 1), played("a", 0, 0)]  # a call helps
    level = [played("b", 1, 1), played("b", 0, 1), played("b", 0, 0), played("b", 1, 0)]
    only_calls = [played("c", 0, 1), played("c", 0, 2)]  # calls, all in vain, on a task that nobody tried without
    metrics = metrics_of(*helped, *level, *only_calls)
    assert metrics["interaction/evidence"] == 0.5
    assert metrics["interaction/tasks_both_ways"] == pytest.approx(2 / 3)
    assert "interaction/evidence" not in metrics_of(*only_calls)


def test_the_share_of_a_component_counts_what_it_takes_as_much_as_what_it_gives() -> None:
    one, other = played("a", 1, 1, cost=-0.5), played("b", 0, 1, cost=0.5)
    one.turns[0].rewards["format"] = -1.0
    metrics = metrics_of(one, other)
    shares = {name: metrics[f"reward/share/{name}"] for name in ("outcome", "cost", "format")}
    assert shares == {"outcome": pytest.approx(1 / 3), "cost": pytest.approx(1 / 3), "format": pytest.approx(1 / 3)}
    assert metrics["reward/component/cost"] == 0.0


def test_groups_without_signal_are_those_that_were_dropped_too() -> None:
    spread, flat = [played("a", 1, 1), played("a", 0, 1)], [played("b", 1, 1), played("b", 1, 0)]
    assert metrics_of(*spread, *flat)["signal/groups_without"] == 0.5
    assert metrics_of(*spread, *flat, dropped_groups=2)["signal/groups_without"] == 0.75
    assert metrics_of(*spread)["signal/groups_without"] == 0.0


def test_references_and_hinted_samples_say_nothing_of_the_policy() -> None:
    silent = [played("a", 0, 0), played("a", 0, 0)]
    reference, hinted = played("a", 1, 9, cost=-5.0), played("a", 1, 9)
    note_guide(reference, "reference")
    note_guide(hinted, "hint")
    metrics = metrics_of(*silent, reference, hinted)
    assert metrics["tool/call_rate"] == metrics["solve_rate"] == metrics["reward/mean"] == 0.0
    assert "interaction/evidence" not in metrics and "reward/component/cost" not in metrics
    assert metrics["signal/groups_without"] == 0.0  # the group as it is trained has spread


def ledger(dropped: dict[str, int]) -> Ledger:
    return Ledger(issued=80, trained=8, ready=0, leased=0, waiting=0, running=0, arrived=0, dropped=dropped)


def test_dropped_groups_are_counted_from_the_account_since_the_last_step() -> None:
    outcomes = StepOutcomes(ledger({"uniform": 16, "infra_error": 3}))
    later = ledger({"uniform": 40, "infra_error": 9})
    assert outcomes.uniform_groups(later, 8) == 3
    outcomes.since_last(later)
    assert outcomes.uniform_groups(later, 8) == 0


TEXTS = (
    "42",
    "<tool_call>",
    "<tool_call></tool_call>",
    '<tool_call>{"name": "python", "arguments": {}}</tool_call>',
    "half a </tool_call>",
    "",
)


@st.composite
def batches(draw: st.DrawFn) -> list[Trajectory]:
    made = []
    for index in range(draw(st.integers(0, 10))):
        task, family = draw(st.sampled_from("abcd")), draw(st.sampled_from(["gcd", "sum", ""]))
        member = played(task, draw(st.sampled_from([0, 0.5, 1])), draw(st.integers(0, 3)), family=family)
        member.id, member.sample_index = f"t{index}", index
        member.outcome = draw(st.sampled_from(Outcome))
        member.rewards["cost"] = draw(st.floats(-10, 10))
        for text in draw(st.lists(st.sampled_from(TEXTS), max_size=3)):
            versions = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
            turn = Turn("policy", [1] * len(versions), [-0.5] * len(versions), versions, "stop", text)
            turn.rewards["format"] = draw(st.floats(-1, 1))
            member.turns.append(turn)
        made.append(member)
    return made


@settings(max_examples=60, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_any_batch_has_known_names_bounded_shares_and_no_order(batch: list[Trajectory], shuffle: random.Random) -> None:
    metrics = metrics_of(*batch, format_state=HERMES.format_state)
    assert [name for name in metrics if known(name) is None] == []
    shares = (
        "tool/call_rate",
        "tool/status",
        "solve_rate",
        "format/",
        "outcome/",
        "limit/",
        "signal/",
        "reward/share/",
    )
    for name, value in metrics.items():
        if name.startswith((*shares, "turns/void", "interaction/tasks_both_ways")):
            assert 0.0 <= value <= 1.0 + 1e-9, name
        elif name in ("interaction/evidence", "reward/gap_calls"):
            assert -20 <= value <= 20
    assert sum(value for name, value in metrics.items() if name.startswith("reward/share/")) in (
        0.0,
        pytest.approx(1.0),
    )
    shuffled = list(batch)
    shuffle.shuffle(shuffled)
    assert metrics_of(*shuffled, format_state=HERMES.format_state) == metrics
