"""Combinations of rewards: what is refused and what warns, with the key and the remedy."""

from __future__ import annotations

import pytest

from toolrl import presets
from toolrl.errors import ConfigError

REFUSED = [
    (["algorithm.advantage.options.alpha=0.5"], "algorithm.advantage.options.alpha", "is the reward code_similarity"),
    (
        ["rewards.components=[format,code_similarity]"],
        "rewards.components.1.options.outcome_reward",
        r"not among rewards.components \(format, code_similarity\); name another",
    ),
    (["rewards.components=[outcome,interaction]", "rewards.weights.outcome=0"], "rewards.weights.outcome", "weight 0"),
    (["rewards.components=[outcome,interaction]", "tools=[]"], "rewards.components.1.name", "there are no tools"),
    (
        [
            "rewards.components=[outcome,interaction]",
            "loop.group_size=1",
            "algorithm.advantage=steppo",
            "critic.kind=own",
        ],
        "loop.group_size",
        "interaction compares the samples of a group",
    ),
    (
        ["rewards.components=[outcome,{name: code_similarity, options: {alpha: 2}}]"],
        "rewards.components.1.options.alpha",
        "worth no more than a right one",
    ),
    (
        ["rewards.components=[outcome,{name: call_validity, options: {penalty: -1}}]"],
        "rewards.components.1.options.penalty",
        "0 or more: it is taken off",
    ),
    (
        ["rewards.components=[outcome,{name: result_use, options: {bonus: -1}}]"],
        "rewards.components.1.options.bonus",
        "0 or more",
    ),
    (
        ["rewards.components=[outcome,{name: call_cost, options: {most: 0}}]"],
        "rewards.components.1.options.most",
        "above 0, or null",
    ),
]
WARNED = [
    (
        ["rewards.components=[outcome,call_cost]", "rollout.max_calls=10"],
        "rewards.components.1.options.cost",
        "10 calls cost 1 and a right answer is worth 1",
    ),
    (["rewards.components=[outcome,format,parse_failure]"], "rewards.components.2.name", "a second time, after format"),
]


@pytest.mark.parametrize(("overrides", "key", "told"), REFUSED, ids=[f"{key} {told}" for _, key, told in REFUSED])
def test_what_cannot_work_is_refused_with_the_key_and_the_remedy(overrides: list[str], key: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        presets.load("quickstart-cpu", overrides)
    assert key in [problem.key for problem in caught.value.problems]


@pytest.mark.parametrize(("overrides", "key", "told"), WARNED, ids=[f"{key} {told}" for _, key, told in WARNED])
def test_what_is_odd_runs_with_a_warning(overrides: list[str], key: str, told: str) -> None:
    _, warnings = presets.load_with_warnings("quickstart-cpu", overrides)
    assert [warning.key for warning in warnings] == [key]
    assert told in warnings[0].message


@pytest.mark.parametrize(
    "overrides",
    [
        ["rewards.components=[outcome,{name: call_cost, options: {most: 0.5}}]", "rollout.max_calls=10"],
        ["rewards.components=[outcome,call_cost]", "rewards.weights.call_cost=0.1", "rollout.max_calls=10"],
        ["rewards.components=[outcome,interaction,code_similarity]", "rewards.weights.outcome=2"],
        ["rewards.components=[{name: interaction, options: {outcome_reward: judge}}]", "rewards.late.names=[judge]"],
        ["rewards.components=[outcome,parse_failure,call_validity,call_success,result_use]"],
    ],
)
def test_what_makes_sense_passes_without_a_warning(overrides: list[str]) -> None:
    assert presets.load_with_warnings("quickstart-cpu", overrides)[1] == []
