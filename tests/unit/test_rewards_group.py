"""Rewards that compare the samples of a group, on hand-made groups."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolrl.algorithms import advantages, embedders
from toolrl.config import Named, RewardConfig
from toolrl.errors import UserError
from toolrl.reward_records import await_rewards
from toolrl.rewards import GroupRewards, scored_at
from toolrl.rewards.group_rewards import GroupRewardFailed
from toolrl.rewards.interaction import evidence
from toolrl.supervision.guidance import note_guide
from toolrl.trajectory import Outcome, ToolCall, ToolResult, Trajectory, Turn

WORKS, OTHER = "a = 17\nprint(a * 24)", "print(sum(range(5)) ** 7)"


def member(outcome: float, code: str | None = None, shown: str = "408", said: str = "\\boxed{408}") -> Trajectory:
    answer = Turn("policy", [3], [-0.1], [0], text=said)
    turns = [answer]
    if code is not None:
        call = Turn("policy", [1], [-0.1], [0], calls=[ToolCall("call_0", "python", {"code": code})])
        turns = [call, Turn("tool", [2], results=[ToolResult("call_0", "python", "ok", shown)]), answer]
    return Trajectory("t", "g", "task", 0, [1], turns, Outcome.ANSWERED, rewards={"outcome": outcome})


def scored(name: str, group: list[Trajectory], weights: dict[str, float] | None = None, **options) -> list[float]:
    config = RewardConfig([Named("outcome"), Named(name, options)], weights or {})
    GroupRewards.of(config).score([group])
    return [each.rewards.get(name, math.nan) for each in group]


def test_interaction_pays_right_callers_by_how_much_calls_helped_on_this_task():
    group = [member(1.0, WORKS), member(1.0, WORKS), member(0.0, WORKS, said="\\boxed{407}"), member(1.0), member(0.0)]
    # 2 of 2 with something used are right; 1 of 3 without: the one that called and wrote another number used nothing.
    assert scored("interaction", group) == pytest.approx([2 / 3, 2 / 3, 0, 0, 0])


@pytest.mark.parametrize(
    "group",
    [
        [member(1.0, WORKS), member(1.0, WORKS)],
        [member(1.0), member(0.0)],
        [member(1.0, WORKS), member(1.0), member(1.0)],
        [member(0.0, WORKS), member(1.0), member(1.0, WORKS)],
    ],
    ids=["all called", "none called", "calls changed nothing", "calls hurt"],
)
def test_interaction_pays_nothing_without_evidence_that_calls_were_needed(group):
    assert scored("interaction", group) == [0.0] * len(group)


def test_the_number_of_calls_is_nowhere_in_the_interaction_reward():
    many = member(1.0, WORKS)
    more = [
        part
        for index in range(1, 6)
        for part in (
            Turn(
                "policy",
                [1],
                [-0.1],
                [0],
                calls=[ToolCall(f"call_{index}", "python", {"code": f"print({index} + 500)"})],
            ),
            Turn("tool", [2], results=[ToolResult(f"call_{index}", "python", "ok", str(index + 500))]),
        )
    ]
    many.turns[2:2] = more
    once, often, silent = scored("interaction", [member(1.0, WORKS), many, member(0.0)])
    assert once == often == 1.0 and silent == 0.0


def test_what_the_policy_did_not_sample_by_itself_is_no_evidence():
    reference = member(1.0, WORKS)
    note_guide(reference, "reference")
    assert scored("interaction", [reference, member(0.0), member(0.0)]) == [0.0, 0.0, 0.0]
    assert scored("interaction", [reference, member(1.0, WORKS), member(0.0)]) == [0.0, 1.0, 0.0]


@given(st.lists(st.booleans(), max_size=8), st.lists(st.booleans(), max_size=8))
def test_evidence_is_a_difference_of_solve_rates(with_calls, without):
    found = evidence(with_calls, without)
    if not with_calls or not without:
        assert found is None
    else:
        assert found == pytest.approx(-(evidence(without, with_calls) or 0.0)) and -1 <= found <= 1
        assert evidence(with_calls * 3, without * 2) == pytest.approx(found), "rates, not numbers"


def test_code_similarity_is_gtpos_outcome_of_the_wrong_ones():
    group = [member(1.0, WORKS), member(1.0, OTHER), member(0.0, WORKS), member(0.0), member(0.3, WORKS)]
    embeddings = [embedders.hashed_ngrams(code) if code else None for code in (WORKS, OTHER, WORKS, None, WORKS)]
    shaped = advantages.gtpo_outcome([1, 1, 0, 0, 0], embeddings)
    assert shaped[2] > 0.3
    assert scored("code_similarity", group) == pytest.approx([0, 0, shaped[2], 0, max(0.0, shaped[4] - 0.3)])


def test_code_similarity_never_lowers_a_partial_credit_and_can_be_switched_off():
    def group():
        return [member(1.0, WORKS), member(0.8, WORKS)]

    assert scored("code_similarity", group()) == [0.0, 0.0]
    assert scored("code_similarity", [member(1.0, WORKS), member(0.0, WORKS)], alpha=0.0) == [0.0, 0.0]
    assert scored("code_similarity", [member(1.0, WORKS), member(0.0, WORKS)], alpha=0.25) == pytest.approx([0, 0.25])


def test_who_was_right_is_read_from_the_score_whatever_its_weight():
    group = [member(2.0, WORKS), member(0.0, WORKS), member(0.0)]
    assert scored("code_similarity", group, {"outcome": 2.0, "code_similarity": 0.5}) == pytest.approx([0, 0.25, 0])
    group = [member(0.5, WORKS), member(0.0)]
    assert scored("interaction", group, {"outcome": 0.5}) == [1.0, 0.0]


def test_the_weights_in_force_take_the_place_of_the_configs():
    group = [member(1.0, WORKS), member(0.0)]
    rewards = GroupRewards.of(RewardConfig([Named("outcome"), Named("interaction")], {"interaction": 0.5}))
    rewards.score([group])
    assert group[0].rewards == {"outcome": 1.0, "interaction": 0.5}
    rewards.score([group], {"interaction": 2.0, "outcome": 1.0})
    assert group[0].rewards == {"outcome": 1.0, "interaction": 2.0}, "scored again, not added up"


def test_only_members_that_count_and_have_their_rewards_are_compared():
    late, dead, absent = member(0.0), member(0.0), member(0.0)
    await_rewards(late, {"judge": 1.0})
    dead.outcome = Outcome.INFRA_ERROR
    absent.turns = []
    group = [member(1.0, WORKS), late, dead, absent]
    GroupRewards.of(RewardConfig([Named("outcome"), Named("interaction")])).score([group, []])
    assert [each.rewards.get("interaction") for each in group] == [0.0, None, None, None]


@scored_at("group")
def odd(group, context, *, what):
    if what == "raise":
        raise ZeroDivisionError("of mine")
    return {"short": [0.0], "nan": [math.nan, 0.0], "turns": [[0.0, 0.0, 0.0], 0.0], "right": [[1.0, 2.0], 3.0]}[what]


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("raise", "ZeroDivisionError: of mine"),
        ("short", "gave 1 scores for 2 members"),
        ("nan", "must be finite"),
        ("turns", "3 numbers for 2 policy turns"),
    ],
)
def test_a_group_reward_that_fails_is_named_with_its_group(what, told):
    rewards = GroupRewards.of(RewardConfig([Named(f"{__name__}:odd", {"what": what})]))
    with pytest.raises(GroupRewardFailed, match=f"'odd' failed on group g: .*{told}.* resume the run"):
        rewards.score([[member(1.0, WORKS), member(0.0)]])


def test_a_group_reward_may_fall_on_turns_and_can_be_pickled():
    config = RewardConfig([Named(f"{__name__}:odd", {"what": "right"})], {"odd": 0.5})
    group = [member(1.0, WORKS), member(0.0)]
    rewards = pickle.loads(pickle.dumps(GroupRewards.of(config)))
    rewards.score([group])
    assert group[0].turn_rewards == [0.5, 1.0] and group[1].rewards["odd"] == 1.5
    assert not rewards.has_signal([member(1.0, WORKS), member(0.0)]), "3 and 3"


def test_a_wrong_option_is_refused_and_no_group_reward_is_no_work():
    with pytest.raises(UserError, match=r"'alfa'.*its options: alpha, embedder, outcome_reward"):
        GroupRewards.of(RewardConfig([Named("code_similarity", {"alfa": 1})]))
    assert not GroupRewards.of(RewardConfig())
