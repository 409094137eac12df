"""The learner's side of the store: which groups a batch holds, and that each is trained exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.replay import LeaseLost, ReplayStore, read_trajectories
from actors.replay.policies import Candidate, Demand, freshest
from tests.replay_samples import Clock, MakeStore, all_tickets, finish, sample, train
from toolrl.trajectory import Outcome


def ready(store: ReplayStore, version: int = 0) -> None:
    """Works off every ticket there is."""
    for ticket in all_tickets(store):
        finish(store, "w0", ticket, version=version)


# Exactly once.


def test_a_batch_holds_whole_groups_and_waits_until_there_are_enough(make: MakeStore) -> None:
    store = make()
    first, second = all_tickets(store)
    finish(store, "w0", first)
    assert store.lease_batch("learner", 2, 0) is None
    finish(store, "w0", second)
    batch = store.lease_batch("learner", 2, 0)
    assert batch is not None
    assert [[t.sample_index for t in group] for group in batch.trajectories()] == [[0, 1, 2, 3]] * 2
    assert store.lease_batch("learner", 1, 0) is None, "what is leased is not leased twice"
    assert store.ledger().leased == 8


def test_acknowledging_twice_trains_once(make: MakeStore) -> None:
    store = make()
    ready(store)
    batch = store.lease_batch("learner", 2, 0)
    assert batch is not None
    assert store.ack(batch.batch_id, step=1, version=1) is True
    assert store.ack(batch.batch_id, step=1, version=1) is False
    assert store.ledger().trained == 8
    assert store.trained_task_indices() == [0, 1]


def test_a_rejected_batch_is_dropped_for_good_and_new_tasks_take_its_place(make: MakeStore) -> None:
    store = make(total_groups=2)
    ready(store)
    batch = store.lease_batch("learner", 2, 0)
    assert batch is not None
    assert store.reject(batch.batch_id, "rejected") is True
    assert store.reject(batch.batch_id, "rejected") is False
    assert store.ledger().dropped == {"rejected": 8} and store.ledger().trained == 0
    with pytest.raises(LeaseLost):
        store.ack(batch.batch_id, step=1, version=1)
    ready(store)
    assert train(store, 2, 1, 0) == [2, 3]
    with pytest.raises(LeaseLost):
        store.reject(2, "rejected")
    assert store.lease_ticket("w0") is None, "two groups are trained, and no more were wanted"


def test_while_admission_is_closed_no_ticket_is_given_and_what_was_begun_is_kept(make: MakeStore) -> None:
    store = make()
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    store.admit(False)
    finish(store, "w0", ticket)
    assert store.lease_ticket("w0") is None
    store = make()
    assert store.lease_ticket("w0") is None, "it stays closed when the store is opened again"
    store.admit(True)
    assert len(all_tickets(store)) == 1
    store.admit(False)
    store.rollback_to(0, 0)
    assert store.lease_ticket("w0") is not None


def test_what_is_given_back_is_trained_later(make: MakeStore) -> None:
    store = make()
    ready(store)
    batch = store.lease_batch("learner", 2, 0)
    assert batch is not None
    assert store.nack(batch.batch_id) is True
    assert store.nack(batch.batch_id) is False
    assert train(store, 2, 1, 0) == [0, 1]


def test_a_silent_learner_loses_its_lease_and_not_the_work(make: MakeStore, clock: Clock) -> None:
    store = make()
    ready(store)
    batch = store.lease_batch("dead", 2, 0)
    assert batch is not None
    clock.now += 500
    assert store.heartbeat_batch(batch.batch_id)
    clock.now += 500
    assert store.lease_batch("peer", 2, 0) is None
    clock.now += 101
    assert train(store, 2, 1, 0) == [0, 1]
    assert not store.heartbeat_batch(batch.batch_id)


def test_a_late_acknowledgement_counts_only_while_nobody_else_has_the_groups(make: MakeStore, clock: Clock) -> None:
    store = make()
    ready(store)
    slow = store.lease_batch("slow", 2, 0)
    assert slow is not None
    clock.now += 601
    assert store.expire() == ([], [slow.batch_id])
    other = store.lease_batch("other", 1, 0)
    assert other is not None
    with pytest.raises(LeaseLost, match=r"batch 1 of slow was taken back and 1 of its 2 groups went elsewhere"):
        store.ack(slow.batch_id, step=1, version=1)
    store.nack(other.batch_id)
    with pytest.raises(LeaseLost):
        store.ack(slow.batch_id, step=1, version=1)
    last = store.lease_batch("last", 2, 0)
    assert last is not None
    clock.now += 601
    store.expire()
    assert store.ack(last.batch_id, step=1, version=1) is True
    assert store.ledger().trained == 8


def test_a_late_acknowledgement_does_not_count_for_what_was_generated_anew_since(make: MakeStore) -> None:
    store = make()
    ready(store)
    batch = store.lease_batch("slow", 2, 0)
    assert batch is not None
    store.nack(batch.batch_id)
    store.set_version(1)
    assert store.lease_batch("other", 2, 1) is None, "all of it is too old by now"
    ready(store, version=1)
    assert store.ledger().ready == 8
    with pytest.raises(LeaseLost, match="2 of its 2 groups went elsewhere"):
        store.ack(batch.batch_id, step=1, version=1)


def test_a_batch_that_was_never_leased_cannot_be_acknowledged(make: MakeStore) -> None:
    with pytest.raises(LeaseLost, match="batch 7 was never leased"):
        make().ack(7, step=1, version=1)


def test_the_same_request_gets_the_same_batch(make: MakeStore) -> None:
    store = make()
    ready(store)
    first = store.lease_batch("learner", 1, 0, request="step 1")
    assert first is not None
    assert store.lease_batch("learner", 1, 0, request="step 1") == first
    second = store.lease_batch("learner", 1, 0, request="step 2")
    assert second is not None
    assert second.batch_id != first.batch_id


# Staleness and order.


def test_no_token_older_than_the_bound_reaches_the_learner(make: MakeStore) -> None:
    store = make(max_staleness=1)
    tickets = all_tickets(store)
    store.set_version(2)
    first = tickets[0]
    store.put("w0", [sample(first.group_id, i, versions=(0, 2) if i == 3 else (1, 2)) for i in range(4)])
    for ticket in tickets[1:]:
        finish(store, "w0", ticket, version=2)
    assert store.lease_batch("learner", 2, 2) is None
    assert store.ledger().reissued == {"stale": 1}, "a sample of group 0 has a token that is two versions old"
    again = store.lease_ticket("w0")
    assert again is not None
    assert (again.task_index, again.samples_missing, again.version) == (0, [3], 2)
    finish(store, "w0", again, version=2)
    assert train(store, 2, 3, 2) == [0, 1]


def test_unfinished_work_that_would_be_stale_is_not_handed_on(make: MakeStore) -> None:
    store = make(max_staleness=1)
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    store.put_progress("w0", [sample(ticket.group_id, i, outcome=None, versions=[v]) for i, v in ((0, 0), (1, 1))])
    store.set_version(2)
    store.return_ticket("w0", ticket.group_id)
    again = store.lease_ticket("w1")
    assert again is not None
    assert list(again.progress) == [1]
    assert store.ledger().puts["progress_too_old"] == 1


def test_fifo_waits_for_a_group_whose_last_chance_it_is(make: MakeStore) -> None:
    store = make(max_staleness=1)
    tickets = all_tickets(store)
    for ticket in tickets[1:]:
        finish(store, "w0", ticket)
    assert train(store, 2, 1, 0) == [1, 2], "version 0 is young enough for the next batch"
    for ticket in all_tickets(store):
        finish(store, "w0", ticket, version=1)
    assert store.lease_batch("learner", 2, 1) is None, "group 0 would be too old for the batch after this one"
    finish(store, "w0", tickets[0])
    assert train(store, 2, 2, 1) == [0, 3]


def test_fifo_waits_no_second_time_for_a_group_that_is_too_old_by_now(make: MakeStore) -> None:
    store = make(batch_groups=1, max_staleness=1)
    slow, *others = all_tickets(store)
    for version in (0, 1):
        finish(store, "w0", others[0], version=version)
        batch = store.lease_batch("learner", 1, version)
        if version == 1:
            assert batch is None, "it is the slow group's last chance"
            batch = store.lease_batch("learner", 1, version, patient=False)
        assert batch is not None
        store.ack(batch.batch_id, version + 1, version + 1)
        store.set_version(version + 1)
        others = all_tickets(store)
    finish(store, "w0", others[0], version=2)
    assert train(store, 1, 3, 2) == [3], "nothing that comes of the slow group now could be trained"
    store.put("w0", [sample(slow.group_id, i, versions=(0, 3)) for i in range(4)])
    assert store.lease_batch("learner", 1, 3) is None
    assert store.ledger().reissued == {"stale": 4}
    again = store.lease_ticket("w0")
    assert again is not None
    finish(store, "w0", again, version=3)
    assert train(store, 1, 4, 3) == [0]


def test_an_impatient_learner_goes_on_without_what_never_arrives(make: MakeStore) -> None:
    store = make()
    first, second = all_tickets(store)
    finish(store, "w0", first)
    store.put("w0", [sample(second.group_id, i) for i in range(3)])
    assert store.lease_batch("learner", 2, 0) is None
    batch = store.lease_batch("learner", 2, 0, patient=False)
    assert batch is not None
    assert [len(group) for group in batch.trajectories()] == [4, 3]
    assert store.ledger().dropped == {"late": 1}
    assert store.put("w0", [sample(second.group_id, 3)]) == ["closed"]


def test_impatience_closes_no_more_groups_than_are_wanted(make: MakeStore) -> None:
    store = make(batch_groups=3)
    for ticket in all_tickets(store):
        store.put("w0", [sample(ticket.group_id, i) for i in range(3)])
    assert store.lease_batch("learner", 2, 0, patient=False) is not None
    assert store.ledger().dropped == {"late": 2}


def test_freshest_takes_the_newest_tokens_first(make: MakeStore) -> None:
    store = make(max_staleness=2, sampling="freshest")
    tickets = all_tickets(store)
    store.set_version(1)
    for version, ticket in zip((0, 1, 0, 1, 1, 0), tickets, strict=True):
        finish(store, "w0", ticket, version=version)
    batch = store.lease_batch("learner", 3, 1)
    assert batch is not None
    assert [group.task_index for group in batch.groups] == [1, 3, 4]


def newest_task_first(ready: list[Candidate], unfinished: list[Candidate], demand: Demand) -> list[Candidate] | None:
    chosen = sorted(ready, key=lambda group: -group.task_index)[: demand.n_groups]
    return chosen if len(chosen) == demand.n_groups else None


def test_a_users_own_policy_is_found_by_import_path(make: MakeStore) -> None:
    store = make(batch_groups=3, sampling="tests.unit.replay.test_batches:newest_task_first")
    ready(store)
    batch = store.lease_batch("learner", 2, 0)
    assert batch is not None
    assert [group.task_index for group in batch.groups] == [1, 2]


def test_a_policy_that_finds_too_few_waits() -> None:
    assert freshest([Candidate(0, 0, 0)], [], Demand(2, 0, 0)) is None


# Going back to a checkpoint.


def test_after_a_rollback_later_steps_are_trained_again_and_task_ids_follow_on(make: MakeStore) -> None:
    store = make(max_staleness=1)
    for version in range(4):
        ready(store, version)
        train(store, 2, version + 1, version)
    assert store.trained_task_indices() == list(range(8))
    ready(store, 4)
    leased = store.lease_batch("learner", 2, 4)
    assert leased is not None

    counts = store.rollback_to(step=2, version=2)

    assert counts == {"untrained": 4, "reissued": 16}, "groups 8 to 11 hold tokens of versions 3 and 4"
    assert store.trained_task_indices() == [0, 1, 2, 3]
    with pytest.raises(LeaseLost):
        store.ack(leased.batch_id, step=5, version=5)
    assert train(store, 2, 3, 2) == [4, 5], "sampled by versions 1 and 2: still good"
    for version in (3, 4, 5):
        again = all_tickets(store)
        tasks = [2 * version + 2, 2 * version + 3]
        assert [(t.task_index, t.samples_missing) for t in again] == [(task, [0, 1, 2, 3]) for task in tasks]
        for ticket in again:
            finish(store, "w0", ticket, version=version)
        train(store, 2, version + 1, version)
    assert store.trained_task_indices() == list(range(12))
    assert store.ledger().reissued == {"rolled_back": 16}, "nothing was generated to be thrown away"
    assert store.lease_ticket("w0").task_index == 14  # type: ignore[union-attr]


def test_after_a_rollback_only_samples_of_lost_weights_are_generated_anew(make: MakeStore) -> None:
    store = make(batch_groups=1)
    store.set_version(1)
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    store.put("w0", [sample(ticket.group_id, i, versions=(1, 2) if i == 2 else (1, 1)) for i in range(3)])
    store.put_progress("w0", [sample(ticket.group_id, 3, outcome=None, versions=(1, 2))])
    assert store.rollback_to(step=1, version=1) == {"untrained": 0, "reissued": 1}
    again = store.lease_ticket("w1")
    assert again is not None
    assert (again.task_index, again.samples_missing, again.progress) == (0, [2, 3], {})
    assert again.attempts == {2: 1, 3: 1}, "no attempt is used up"


def test_after_a_rollback_what_is_too_old_for_the_checkpoint_is_generated_anew_at_once(make: MakeStore) -> None:
    store = make()
    first, second = all_tickets(store)
    finish(store, "w0", first)
    store.put("w0", [sample(second.group_id, 0)])
    store.set_version(2)
    assert store.rollback_to(step=1, version=1) == {"untrained": 0, "reissued": 5}
    assert [(t.task_index, len(t.samples_missing)) for t in all_tickets(store, "w1")] == [(0, 4), (1, 4)]


def test_after_a_rollback_a_worker_delivers_nothing_from_before_it(make: MakeStore) -> None:
    store = make()
    ticket = store.lease_ticket("old")
    assert ticket is not None
    store.rollback_to(step=0, version=0)
    assert store.put("old", [sample(ticket.group_id, 0)]) == ["fenced"]
    assert store.put_progress("old", [sample(ticket.group_id, 0, outcome=None)]) == 0
    assert store.lease_ticket("old") == ticket
    assert store.put("old", [sample(ticket.group_id, 0)]) == ["accepted"]


def test_a_rollback_beyond_the_kept_payloads_generates_anew(make: MakeStore, tmp_path: Path) -> None:
    store = make(keep_trained_steps=1, max_staleness=3, batch_groups=1)
    for version in range(3):
        ready(store)
        train(store, 1, version + 1, version)
    assert store.rollback_to(step=0, version=0) == {"untrained": 3, "reissued": 8}
    assert store.ledger().reissued == {"pruned": 8}
    train(store, 2, 1, 0)
    assert [t.task_index for t in all_tickets(store)] == [0, 1]


def test_a_rollback_leaves_the_dropped_dropped(make: MakeStore) -> None:
    store = make(batch_groups=1)
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    store.put("w0", [sample(ticket.group_id, i, outcome=Outcome.REWARD_MISSING) for i in range(4)])
    ready(store)
    train(store, 1, 1, 0)
    store.rollback_to(step=0, version=0)
    assert train(store, 1, 1, 0) == [1]
    assert store.ledger().dropped == {"reward_missing": 4}


def test_versions_only_rise_but_for_a_rollback(make: MakeStore) -> None:
    store = make()
    store.set_version(3)
    store.set_version(3)
    with pytest.raises(ValueError, match=r"version 2 after version 3: .* use rollback_to"):
        store.set_version(2)


def test_finished_work_can_be_read_while_the_store_is_open(make: MakeStore, tmp_path: Path) -> None:
    store = make()
    ready(store)
    assert len(list(read_trajectories(tmp_path / "replay.db"))) == 8
