"""The evaluation table: what counts as right, unbiased pass@k, families, samples that count nowhere."""

from __future__ import annotations

import itertools

import pytest

from toolrl.app.evaluation_table import evaluation_table, pass_at_k
from toolrl.trajectory import CallError, Outcome, ToolCall, ToolResult, Trajectory, Turn


def episode(
    task: str,
    sample: int,
    score: float,
    *,
    calls: int = 0,
    errors: int = 0,
    outcome: Outcome = Outcome.ANSWERED,
    family: str = "gcd",
) -> Trajectory:
    turns = []
    for number in range(calls + errors):
        good = number < calls
        turns.append(
            Turn(
                kind="policy",
                token_ids=[1, 2],
                logprobs=[0.0, 0.0],
                weight_versions=[0, 0],
                finish_reason="stop",
                calls=[ToolCall(f"call_{number}", "python", {"code": "1"})] if good else [],
                call_errors=[] if good else [CallError("bad_json", "no")],
            )
        )
        status = "ok" if good else "invalid_call"
        turns.append(Turn(kind="tool", token_ids=[3], results=[ToolResult(f"call_{number}", "python", status, "1")]))
    turns.append(Turn("policy", [1], [0.0], [0], "stop"))
    return Trajectory(
        id=f"{task}.{sample}",
        group_id=task,
        task_id=task,
        sample_index=sample,
        prompt_ids=[1],
        turns=turns,
        outcome=outcome,
        answer="1",
        rewards={"outcome": score},
        metadata={"family": family},
    )


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        marks = [True] * right + [False] * (samples - right)
        subsets = list(itertools.combinations(marks, k))
        assert pass_at_k(samples, right, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


@pytest.mark.parametrize(("samples", "right", "k"), [(2, 3, 1), (2, 1, 3), (2, 1, 0), (2, -1, 1)])
def test_pass_at_k_refuses_what_has_no_meaning(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(samples, right, k)


def test_accuracy_reads_first_samples_and_avg_reads_all() -> None:
    table = evaluation_table([episode("a", 1, 1.0), episode("a", 0, 0.0), episode("b", 0, 1.0), episode("b", 1, 1.0)])
    assert table["all"]["accuracy"] == 0.5
    assert table["all"]["avg@2"] == 0.75
    assert table["all"]["pass@1"] == 0.75
    assert table["all"]["pass@2"] == 1.0
    assert (table["all"]["tasks"], table["all"]["samples"], table["all"]["missing"]) == (2, 4, 0)


def test_a_score_for_the_attempt_is_not_right() -> None:
    assert evaluation_table([episode("a", 0, 0.01)])["all"]["accuracy"] == 0.0


def test_the_weight_of_the_outcome_does_not_change_who_is_right() -> None:
    table = evaluation_table([episode("a", 0, 2.0), episode("b", 0, 1.0)], outcome_weight=2.0)
    assert table["all"]["accuracy"] == 0.5


@pytest.mark.parametrize("outcome", [Outcome.INFRA_ERROR, Outcome.REWARD_MISSING, Outcome.CANCELLED])
def test_what_is_not_the_policys_counts_as_missing_only(outcome: Outcome) -> None:
    table = evaluation_table([episode("a", 0, 1.0), episode("b", 0, 0.0, outcome=outcome)])
    assert table["all"]["accuracy"] == 1.0
    assert (table["all"]["samples"], table["all"]["missing"]) == (1, 1)


def test_tool_use_and_format_are_counted_from_the_turns() -> None:
    table = evaluation_table([episode("a", 0, 1.0, calls=2, errors=1), episode("b", 0, 0.0)])
    assert table["all"]["tool_call_rate"] == 0.5
    assert table["all"]["calls_per_trajectory"] == 1.0
    assert table["all"]["tool_failure_rate"] == pytest.approx(1 / 3)
    assert table["all"]["format_validity"] == pytest.approx(4 / 5)
    assert table["all"]["policy_tokens"] == 4.0


def test_a_parsers_own_verdict_on_the_format_is_used_when_given() -> None:
    table = evaluation_table([episode("a", 0, 1.0, calls=1)], format_state=lambda text, reason: "polluted")
    assert table["all"]["format_validity"] == 0.0


def test_families_are_measured_apart() -> None:
    table = evaluation_table([episode("a", 0, 1.0, family="lcm"), episode("b", 0, 0.0, family="gcd")])
    assert list(table["by_family"]) == ["gcd", "lcm"]
    assert table["by_family"]["lcm"]["accuracy"] == 1.0
    assert table["by_family"]["gcd"]["accuracy"] == 0.0


def test_pass_at_k_goes_no_further_than_the_samples_every_task_has() -> None:
    table = evaluation_table([*(episode("a", i, 1.0) for i in range(4)), *(episode("b", i, 0.0) for i in range(3))])
    assert [key for key in table["all"] if key.startswith("pass@")] == ["pass@1", "pass@2", "pass@3"]


def test_no_episodes_give_an_empty_table_not_an_error() -> None:
    assert evaluation_table([])["all"]["samples"] == 0
