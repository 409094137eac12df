"""A group whose recorded rewards are equal is kept where the rewards that compare its samples will tell them apart."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest

from actors.replay import ReplaySettings, ReplayStore
from tests.replay_samples import MakeStore, sample
from toolrl import presets
from toolrl.config import Named, RewardConfig
from toolrl.rewards import GroupContext, GroupRewards, scored_at
from toolrl.trajectory import ToolCall, ToolResult, Trajectory, Turn


@scored_at("group")
def brevity(group: Sequence[Trajectory], context: GroupContext) -> list[float]:
    shortest = min(len(member.response_ids) for member in group)
    return [float(len(member.response_ids) == shortest) for member in group]


@scored_at("group")
def broken(group: Sequence[Trajectory], context: GroupContext) -> list[float]:
    raise ZeroDivisionError("of mine")


def rewards(*names: str) -> GroupRewards:
    return GroupRewards.of(RewardConfig([Named("outcome"), *map(Named, names)]))


def put(store: ReplayStore, members: Sequence[Trajectory]) -> None:
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    for index, member in enumerate(members):
        member.group_id, member.sample_index = ticket.group_id, index
    assert set(store.put("w0", members)) == {"accepted"}


def of_length(*lengths: int) -> list[Trajectory]:
    return [sample("", index, versions=[0] * length, reward=0.5) for index, length in enumerate(lengths)]


def test_what_a_group_reward_tells_apart_is_kept(make: MakeStore) -> None:
    store = make(batch_groups=1, group_rewards=rewards(f"{__name__}:brevity"))
    put(store, of_length(2, 3, 3, 3))
    assert store.lease_batch("learner", 1, 0) is not None and store.ledger().dropped == {}


def test_what_it_does_not_is_dropped_as_before(make: MakeStore) -> None:
    store = make(batch_groups=1, group_rewards=rewards(f"{__name__}:brevity"))
    put(store, of_length(3, 3, 3, 3))
    assert store.ledger().dropped == {"uniform": 4}


def test_a_group_reward_that_fails_is_for_the_learners_side_to_report(make: MakeStore) -> None:
    store = make(batch_groups=1, group_rewards=rewards(f"{__name__}:broken"))
    put(store, of_length(2, 2, 2, 2))
    assert store.lease_batch("learner", 1, 0) is not None


def member(right: bool, calls: bool) -> Trajectory:
    """Whoever calls pays for it as much as a right answer is worth."""
    answer = Turn("policy", [1], [-0.5], [0], "stop", text="\\boxed{408}")
    made = Trajectory("", "", "t", 0, [1], [answer], sample("", 0).outcome, rewards={"outcome": float(right)})
    if calls:
        code = {"code": "print(17 * 24)"}
        call = Turn("policy", [1], [-0.5], [0], "stop", calls=[ToolCall("call_0", "python", code)])
        call.rewards = {"call_cost": -float(right)}
        made.turns = [call, Turn("tool", [2], results=[ToolResult("call_0", "python", "ok", "408")]), answer]
    return made


@pytest.mark.parametrize(("right_without", "dropped"), [(False, {}), (True, {"uniform": 4})])
def test_interaction_counts_where_the_price_of_calls_has_made_all_equal(
    make: MakeStore, right_without: bool, dropped: dict[str, int]
) -> None:
    store = make(batch_groups=1, group_rewards=rewards("interaction"))
    group = [member(right=True, calls=True) for _ in range(2)] + [
        member(right=right_without, calls=False) for _ in range(2)
    ]
    if right_without:
        for each in group:
            each.turns[0].rewards.clear()
    put(store, group)
    assert store.ledger().dropped == dropped


def test_the_settings_of_a_run_reach_the_buffers_process() -> None:
    config = presets.load("quickstart-cpu", ["recipe=interaction", "buffer.drop_uniform_groups=true"])
    settings = pickle.loads(pickle.dumps(ReplaySettings.of(config)))
    assert settings.group_rewards is not None and list(settings.group_rewards.components) == ["interaction"]


@pytest.mark.parametrize(
    ("turn_credit", "credit", "dropped"),
    [
        (True, [0.5, -0.5], {}),
        (False, [0.5, -0.5], {"uniform": 4}),
        (True, [0.0, 0.0], {"uniform": 4}),
    ],
)
def test_turns_that_earned_differently_teach_where_each_is_taught_by_its_own(
    make: MakeStore, turn_credit: bool, credit: list[float], dropped: dict[str, int]
) -> None:
    """All failed, but on the way they stood better: the sums are equal, the turns are not."""
    store = make(batch_groups=1, turn_credit=turn_credit)
    failed = [member(right=False, calls=True) for _ in range(4)]
    for each in failed:
        for turn, reward in zip(each.policy_turns, credit, strict=True):
            turn.rewards = {"monte_carlo": reward}
    put(store, failed)
    assert store.ledger().dropped == dropped
    assert (store.lease_batch("learner", 1, 0) is None) == bool(dropped)
