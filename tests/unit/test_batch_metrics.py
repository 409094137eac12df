"""The metrics of a batch, on batches whose numbers are plain to see."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from toolrl import toolcalls
from toolrl.monitors import batch_metrics
from toolrl.reward_records import await_rewards
from toolrl.trajectory import LimitName, Outcome, ToolCall, ToolResult, ToolStatus, Trajectory, Turn


def policy(tokens: int, calls: int = 0, version: int = 3, text: str = "x", finish: str = "stop") -> Turn:
    made = [ToolCall(f"call_{i}", "python", {"code": "1"}) for i in range(calls)]
    return Turn("policy", [7] * tokens, [-1.0] * tokens, [version] * tokens, finish, text, made)


def tool(tokens: int, *statuses: ToolStatus) -> Turn:
    return Turn("tool", [9] * tokens, results=[ToolResult("call_0", "python", s, "1", queue_s=0.5) for s in statuses])


def episode(*turns: Turn, outcome: Outcome = Outcome.ANSWERED, reward: float = 0.0, **fields: object) -> Trajectory:
    made = Trajectory("t", "g", "task", 0, [1] * 50, list(turns), outcome=outcome, rewards={"outcome": reward})
    return replace(made, **fields)  # type: ignore[arg-type]


def test_nothing_truncated_is_a_truncation_rate_of_exactly_zero() -> None:
    batch = [episode(policy(400), outcome=o) for o in Outcome if o.trained and o is not Outcome.LENGTH]
    assert batch_metrics(batch, learner_version=3)["length/truncation_rate"] == 0.0
    cut = batch_metrics([*batch, episode(policy(4), outcome=Outcome.LENGTH)], learner_version=3)
    assert cut["length/truncation_rate"] == 1 / (len(batch) + 1)


def test_a_response_with_a_gap_is_as_long_as_the_sum_of_its_mask() -> None:
    gapped = episode(policy(5, 1), tool(100, "ok"), policy(7))
    metrics = batch_metrics([gapped], learner_version=3)
    assert metrics["length/policy_mean"] == metrics["length/policy_max"] == sum(gapped.policy_mask()) == 12
    assert metrics["length/total_mean"] == 50 + 112


@pytest.mark.parametrize("name", get_args(LimitName))
def test_each_limit_is_counted_under_its_own_name(name: LimitName) -> None:
    batch = [episode(policy(4)) for _ in range(3)] + [episode(policy(4), outcome=Outcome.LENGTH, limit=name)]
    counted = {k: v for k, v in batch_metrics(batch, learner_version=3).items() if k.startswith("limit/")}
    assert counted == {f"limit/{other}": 0.25 * (other == name) for other in get_args(LimitName)}


def test_means_are_over_what_is_trained_and_outcomes_over_all() -> None:
    batch = [
        episode(policy(4), reward=1.0),
        episode(policy(4), reward=0.0, outcome=Outcome.NO_ANSWER),
        episode(policy(999, 5), reward=9.0, outcome=Outcome.INFRA_ERROR),
        episode(policy(999, 5), reward=9.0, outcome=Outcome.REWARD_MISSING),
    ]
    metrics = batch_metrics(batch, learner_version=3)
    assert (metrics["reward/mean"], metrics["reward/std"], metrics["solve_rate"]) == (0.5, 0.5, 0.5)
    assert metrics["length/policy_max"] == 4 and metrics["tool/call_rate"] == 0.0
    assert {k: v for k, v in metrics.items() if k.startswith("outcome/") and v} == dict.fromkeys(
        ("outcome/answered", "outcome/no_answer", "outcome/infra_error", "outcome/reward_missing"), 0.25
    )


def test_calls_are_counted_by_trajectory_and_by_status() -> None:
    batch = [
        episode(policy(4, 2), tool(3, "ok", "error"), policy(4, 1), tool(3, "invalid_call"), policy(2), reward=1.0),
        episode(policy(4)),
    ]
    metrics = batch_metrics(batch, learner_version=3)
    assert (metrics["tool/call_rate"], metrics["tool/calls_per_trajectory"], metrics["turns/mean"]) == (0.5, 1.5, 2.0)
    statuses = {k: v for k, v in metrics.items() if k.startswith("tool/status/")}
    assert statuses == {f"tool/status/{s}": pytest.approx(1 / 3) for s in ("ok", "error", "invalid_call")}
    assert (metrics["solve_rate/with_calls"], metrics["solve_rate/without_calls"]) == (1.0, 0.0)
    assert metrics["tool/queue_s_mean"] == 0.5 and metrics["tool/wall_s_mean"] == 0.0


def test_staleness_counts_from_the_oldest_token_of_each() -> None:
    batch = [episode(policy(2, 1, version=1), tool(3, "ok"), policy(2, version=3)), episode(policy(2, version=3))]
    metrics = batch_metrics(batch, learner_version=3)
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 2.0)


def test_format_states_are_shares_of_policy_turns() -> None:
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>'
    batch = [episode(policy(4, 1, text=call), tool(3, "ok"), policy(2, text="42"), policy(2, text="<tool_call>"))]
    metrics = batch_metrics(batch, learner_version=3, format_state=toolcalls.get("hermes").format_state)
    assert (metrics["format/healthy_call"], metrics["format/healthy_answer"]) == (
        pytest.approx(1 / 3),
        pytest.approx(1 / 3),
    )
    assert metrics["format/healthy"] == pytest.approx(2 / 3) and metrics["format/collapsed"] == pytest.approx(1 / 3)


def test_an_empty_batch_has_metrics_of_zero() -> None:
    assert {v for k, v in batch_metrics([], learner_version=3).items()} == {0.0}


def test_the_share_of_void_turns_is_over_all_turns_that_are_trained() -> None:
    answered = episode(policy(4, 1), tool(3, "ok"), policy(2), tool(3, "ok"), policy(4), answer="4")
    silent = episode(policy(4), outcome=Outcome.NO_ANSWER)
    lost = episode(policy(4), outcome=Outcome.INFRA_ERROR)
    assert batch_metrics([answered, silent, lost], learner_version=3)["turns/void"] == 0.5


def test_episodes_that_went_on_elsewhere_are_counted() -> None:
    marks = (
        {},
        {"continued_after": [2]},
        {"continued_after": [1, 2], "replay_changed": [{}]},
        {"replay_changed": [{}]},
    )
    metrics = batch_metrics([episode(policy(3), metadata=mark) for mark in marks], learner_version=3)
    assert (metrics["continued/share"], metrics["continued/replay_changed"]) == (0.5, 0.5)


def test_rewards_that_are_still_to_come_are_counted_and_kept_out_of_the_means():
    whole, early = episode(policy(4), reward=1.0), episode(policy(4))
    await_rewards(early, {"judge": 1.0})
    metrics = batch_metrics([whole, early], learner_version=0)
    assert (metrics["reward/mean"], metrics["reward/awaited"]) == (1.0, 0.5)
