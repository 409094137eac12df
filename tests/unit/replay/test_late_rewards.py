"""Trajectories that are finished and unrewarded: groups wait, rewards come in any order, late, twice or never."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

from actors.replay import ReplayStore, RewardAnswer
from tests.replay_samples import Clock, MakeStore, all_tickets, sample, train
from toolrl.reward_records import await_rewards, reward_id
from toolrl.trajectory import Outcome, Trajectory

DEADLINE_S = 100.0


def unrewarded(group_id: str, index: int, *, names: tuple[str, ...] = ("judge",), version: int = 0) -> Trajectory:
    made = sample(group_id, index, versions=(version, version), reward=0.25)
    made.prompt_ids = [index]  # so that neighbours differ in their tokens
    await_rewards(made, dict.fromkeys(names, 0.5))
    return made


def put_group(store: ReplayStore, group_id: str, **options: Any) -> list[str]:
    """Delivers four unrewarded trajectories; returns the ids of their rewards."""
    finished = [unrewarded(group_id, index, **options) for index in range(4)]
    assert store.put("w0", finished) == ["accepted"] * 4
    return [reward_id(each) for each in finished]


def waiting_group(store: ReplayStore, **options: Any) -> list[str]:
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    return put_group(store, ticket.group_id, **options)


def statuses(store: ReplayStore) -> dict[str, int]:
    return store.ledger().late_rewards


def test_a_group_waits_for_its_last_reward_and_holds_them_weighted(make: MakeStore) -> None:
    store = make(batch_groups=1, reward_deadline_s=DEADLINE_S)
    ids = waiting_group(store)
    assert store.ledger().as_dict() | {"unrewarded": 4, "generating": 4} == store.ledger().as_dict()
    for index, each in enumerate(ids):
        assert store.lease_batch("learner", 1, 0) is None, "one reward is missing"
        assert store.deliver_reward(each, "judge", float(index)) == RewardAnswer("accepted")
    batch = store.lease_batch("learner", 1, 0)
    assert batch is not None
    members = batch.trajectories()[0]
    assert [member.rewards for member in members] == [{"outcome": 0.25, "judge": 0.5 * i} for i in range(4)]
    assert all("awaited_rewards" not in member.metadata for member in members)
    assert store.ledger().outcomes == {"answered": 4}


def test_a_trajectory_may_wait_for_several_rewards_one_of_them_turn_by_turn(make: MakeStore) -> None:
    store = make(batch_groups=1, reward_deadline_s=DEADLINE_S)
    ids = waiting_group(store, names=("judge", "steps"))
    for index, each in enumerate(ids):
        assert store.deliver_reward(each, "steps", [float(index)]).status == "accepted"
    assert store.ledger().unrewarded == 4
    for each in ids:
        store.deliver_reward(each, "judge", 1)
    batch = store.lease_batch("learner", 1, 0)
    assert batch is not None
    assert [m.turns[0].rewards for m in batch.trajectories()[0]] == [{"steps": 0.5 * i} for i in range(4)]


def test_after_the_deadline_the_group_goes_on_without(make: MakeStore, clock: Clock) -> None:
    store = make(batch_groups=1, reward_deadline_s=DEADLINE_S)
    ids = waiting_group(store)
    for index in (0, 1, 3):
        store.deliver_reward(ids[index], "judge", float(index))
    clock.now += DEADLINE_S - 1
    assert store.lease_batch("learner", 1, 0) is None
    clock.now += 2
    batch = store.lease_batch("learner", 1, 0)
    assert batch is not None
    assert [member.sample_index for member in batch.trajectories()[0]] == [0, 1, 3]
    ledger = store.ledger()
    assert ledger.dropped == {"reward_missing": 1}
    assert ledger.outcomes == {"answered": 3, "reward_missing": 1}
    answer = store.deliver_reward(ids[2], "judge", 1.0)
    assert answer.status == "late"
    assert "deadline" in answer.why
    assert statuses(store) == {"accepted": 3, "never_came": 1, "late": 1}


def test_a_group_that_none_of_its_rewards_reached_is_dropped_and_refilled(make: MakeStore, clock: Clock) -> None:
    store = make(batch_groups=1, reward_deadline_s=DEADLINE_S)
    waiting_group(store)
    assert store.lease_ticket("w0") is None, "the group that waits counts in the admission bound"
    clock.now += DEADLINE_S + 1
    store.expire()
    assert store.ledger().dropped == {"reward_missing": 4}
    refill = store.lease_ticket("w0")
    assert refill is not None
    assert refill.task_index == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, "1.0", None, [0.1, 0.2], [], [math.nan], {"judge": 1}, 10**400])
def test_what_is_no_reward_is_refused_and_the_right_one_still_counts(make: MakeStore, value: Any) -> None:
    store = make(batch_groups=1, reward_deadline_s=DEADLINE_S)
    ids = waiting_group(store)
    answer = store.deliver_reward(ids[0], "judge", value)
    assert answer.status == "invalid"
    assert "judge" in answer.why
    assert store.deliver_reward(ids[0], "judge", 1.0).status == "accepted"
    assert statuses(store) == {"invalid": 1, "accepted": 1}


def test_twice_and_for_nobody_are_told_apart(make: MakeStore) -> None:
    store = make(batch_groups=1, reward_deadline_s=DEADLINE_S)
    ids = waiting_group(store)
    store.deliver_reward(ids[0], "judge", 1.0)
    assert store.deliver_reward(ids[0], "judge", 0.0).status == "duplicate"
    stranger = store.deliver_reward("g000099-0:abc", "judge", 1.0)
    assert (stranger.status, "'g000099-0:abc'" in stranger.why) == ("unknown", True)
    misnamed = store.deliver_reward(ids[1], "jugde", 1.0)
    assert (misnamed.status, "waits for 'judge' and not for 'jugde'" in misnamed.why) == ("unknown", True)
    assert store.lease_batch("learner", 1, 0) is None, "none of them filled a place"


def test_a_reward_of_an_earlier_try_never_reaches_the_later_one(make: MakeStore) -> None:
    store = make(batch_groups=1, max_staleness=0, reward_deadline_s=DEADLINE_S)
    first = waiting_group(store)
    store.set_version(1)
    assert store.lease_batch("learner", 1, 1) is None
    assert store.ledger().reissued == {"stale": 4}, "waiting for its reward it became too old"
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    again = [unrewarded(ticket.group_id, index, version=1) for index in range(4)]
    for each in again:
        each.turns[0].token_ids = [50, 51]
    store.put("w0", again)
    assert store.deliver_reward(first[0], "judge", 1.0).status == "unknown"
    assert store.deliver_reward(reward_id(again[0]), "judge", 1.0).status == "accepted"


def test_a_claim_is_not_given_to_two_and_comes_back_when_nothing_is_delivered(make: MakeStore, clock: Clock) -> None:
    store = make(batch_groups=1, reward_deadline_s=DEADLINE_S)
    ids = waiting_group(store)
    mine = store.claim_unrewarded("judge", limit=3, claim_s=10.0)
    theirs = store.claim_unrewarded("judge", limit=3, claim_s=10.0)
    assert sorted(each.trajectory_id for each in [*mine, *theirs]) == sorted(ids)
    assert (mine[0].trajectory.rewards, mine[0].seconds_left) == ({"outcome": 0.25}, DEADLINE_S)
    assert store.claim_unrewarded("other") == []
    store.deliver_reward(mine[0].trajectory_id, "judge", 1.0)
    clock.now += 11
    assert len(store.claim_unrewarded("judge")) == 3


def test_waiting_survives_a_restart_which_counts_against_nobody(make: MakeStore, clock: Clock) -> None:
    settings = {"batch_groups": 1, "reward_deadline_s": DEADLINE_S, "worker_lease_s": 60.0}
    ids = waiting_group(make(**settings))
    clock.now += 10 * DEADLINE_S
    store = make(**settings)
    assert store.ledger().unrewarded == 4
    for index, each in enumerate(ids):
        assert store.deliver_reward(each, "judge", float(index)).status == "accepted"
    store = make(**settings)
    assert train(store, 1, 1, 0) == [0]


def test_an_impatient_learner_goes_on_without_what_is_not_rewarded(make: MakeStore) -> None:
    store = make(batch_groups=1, reward_deadline_s=DEADLINE_S)
    ids = waiting_group(store)
    for index in (0, 1):
        store.deliver_reward(ids[index], "judge", float(index))
    batch = store.lease_batch("learner", 1, 0, patient=False)
    assert batch is not None
    assert [member.sample_index for member in batch.trajectories()[0]] == [0, 1]
    assert store.ledger().dropped == {"reward_missing": 2}


def test_fifo_waits_for_a_group_that_waits_for_its_rewards(make: MakeStore) -> None:
    store = make(batch_groups=1, max_staleness=1, reward_deadline_s=DEADLINE_S)
    first, second = all_tickets(store)
    ids = put_group(store, first.group_id)
    store.put("w0", [sample(second.group_id, index) for index in range(4)])
    assert train(store, 1, 1, 0) == [1]
    third = store.lease_ticket("w0")
    assert third is not None
    store.put("w0", [sample(third.group_id, index, versions=(1, 1)) for index in range(4)])
    assert store.lease_batch("learner", 1, 1) is None, "it is the unrewarded group's last chance"
    for index, each in enumerate(ids):
        store.deliver_reward(each, "judge", float(index))
    assert train(store, 1, 2, 1) == [0]


def test_with_bootstrap_nobody_waits_and_rewards_count_until_a_learner_has_them(make: MakeStore) -> None:
    store = make(
        batch_groups=1, reward_deadline_s=DEADLINE_S, bootstrap_rewards=True, drop_uniform_groups=False
    )  # fmt: skip
    ids = waiting_group(store)
    assert store.ledger().ready == 4
    assert store.deliver_reward(ids[0], "judge", 1.0).status == "accepted"
    batch = store.lease_batch("learner", 1, 0)
    assert batch is not None
    members = batch.trajectories()[0]
    assert members[0].rewards == {"outcome": 0.25, "judge": 0.5}
    assert [member.metadata.get("awaited_rewards") for member in members] == [None, *[{"judge": 0.5}] * 3]
    assert store.deliver_reward(ids[1], "judge", 1.0).status == "late"


def test_after_a_rollback_rewarded_work_is_trained_again_and_lost_weights_work_is_not_awaited(make: MakeStore) -> None:
    store = make(batch_groups=1, max_staleness=1, reward_deadline_s=DEADLINE_S)
    for index, each in enumerate(waiting_group(store)):
        store.deliver_reward(each, "judge", float(index))
    assert train(store, 1, 1, 0) == [0]
    lost = waiting_group(store, version=1)
    store.rollback_to(0, 0)
    assert store.deliver_reward(lost[0], "judge", 1.0).status == "unknown"
    assert store.ledger().reissued == {"rolled_back": 4}
    assert train(store, 1, 1, 0) == [0], "with the rewards that it had"


def test_answers_are_not_kept_for_ever(make: MakeStore, clock: Clock) -> None:
    store = make(batch_groups=1, reward_deadline_s=DEADLINE_S)
    for step in range(3):
        for index, each in enumerate(waiting_group(store, version=step)):
            store.deliver_reward(each, "judge", float(index))
        train(store, 1, step + 1, step)
        clock.now += 3 * DEADLINE_S
    (kept,) = store._db.execute("SELECT count(*) FROM awaited_rewards").fetchone()
    assert kept <= 4


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bootstrap", [False, True])
def test_the_account_balances_in_any_history(make: MakeStore, clock: Clock, seed: int, bootstrap: bool) -> None:
    rng = random.Random(seed)
    settings: dict[str, Any] = {
        "max_staleness": 1,
        "reward_deadline_s": DEADLINE_S,
        "bootstrap_rewards": bootstrap,
        "drop_uniform_groups": False,
    }
    store = make(**settings)
    known: list[str] = ["g000000-0:none"]
    answers: Counter[str] = Counter()
    step = version = 0
    for _ in range(150):
        match rng.choice(["ticket", "ticket", "deliver", "deliver", "deliver", "time", "train", "restart", "rollback"]):
            case "ticket":
                if (ticket := store.lease_ticket("w0")) is not None:
                    ends = rng.choices([None, Outcome.INFRA_ERROR, Outcome.REWARD_MISSING], [8, 1, 1], k=4)
                    for index, end in zip(ticket.samples_missing, ends, strict=False):
                        names = ("judge", "steps")[: rng.randint(0, 2)]
                        made = unrewarded(ticket.group_id, index, names=names, version=version)
                        made.outcome = end or Outcome.ANSWERED
                        store.put("w0", [made])
                        known.append(reward_id(made))
            case "deliver":
                for _ in range(4):
                    name, value = rng.choice(["judge", "steps"]), rng.choice([0.0, 1.0, math.nan])
                    answers[store.deliver_reward(rng.choice(known[-16:]), name, value).status] += 1
            case "time":
                clock.now += rng.choice([1.0, DEADLINE_S / 2, DEADLINE_S + 1])
                store.expire()
            case "train":
                batch = store.lease_batch("learner", 2, version, patient=rng.random() < 0.7)
                if batch is not None:
                    assert bootstrap or all(
                        not member.metadata.get("awaited_rewards") for g in batch.trajectories() for member in g
                    )
                    step, version = step + 1, version + 1
                    store.ack(batch.batch_id, step, version)
                    store.set_version(version)
            case "restart" if rng.random() < 0.3:
                store = make(**settings)
            case "rollback" if rng.random() < 0.2 and step:
                step, version = step - 1, version - 1
                store.rollback_to(step, version)
        assert store.ledger().balances
        assert store.audit() == []
    counted = {status: n for status, n in statuses(store).items() if status != "never_came"}
    assert counted == dict(answers)
    assert step > 0
