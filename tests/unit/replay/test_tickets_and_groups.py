"""The store's rules, one by one. Every test ends with an account that balances."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.replay import ReplaySettings, ReplayStore, read_ledger, read_trajectories
from tests.replay_samples import Clock, MakeStore, all_tickets, finish, sample, train
from toolrl.config import RunConfig
from toolrl.registry import UnknownName
from toolrl.trajectory import Outcome

# Tickets and admission.


def test_staleness_zero_hands_out_nothing_before_the_next_version_is_published(make: MakeStore) -> None:
    store = make()
    first = all_tickets(store)
    assert [ticket.task_index for ticket in first] == [0, 1]
    for ticket in first:
        finish(store, "w0", ticket)
    batch = store.lease_batch("learner", 2, 0)
    assert batch is not None
    assert store.lease_ticket("w0") is None
    store.ack(batch.batch_id, step=1, version=1)
    assert store.lease_ticket("w0") is None, "trained, but version 1 is not published"
    store.set_version(1)
    assert [(ticket.task_index, ticket.version) for ticket in all_tickets(store)] == [(2, 1), (3, 1)]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_outstanding_groups_stay_within_the_bound_and_nothing_becomes_stale(make: MakeStore, staleness: int) -> None:
    store = make(max_staleness=staleness)
    for version in range(5):
        tickets = all_tickets(store)
        assert store.stats()["groups_outstanding"] == (staleness + 1) * 2
        for ticket in tickets:
            finish(store, "w0", ticket, version=version)
        assert train(store, 2, version + 1, version) == [2 * version, 2 * version + 1]
    assert store.ledger().reissued == {}


def test_the_run_ends_after_its_number_of_groups_and_refills_dropped_ones(make: MakeStore) -> None:
    store = make(total_groups=3, max_staleness=5)
    tickets = all_tickets(store)
    assert [ticket.task_index for ticket in tickets] == [0, 1, 2]
    store.put("w0", [sample(tickets[0].group_id, i, reward=1.0) for i in range(4)])
    assert [ticket.task_index for ticket in all_tickets(store)] == [3]


def test_a_worker_whose_weights_are_behind_gets_no_ticket_that_it_would_make_stale(make: MakeStore) -> None:
    store = make(max_staleness=1)
    store.set_version(2)
    assert store.lease_ticket("behind", engine_version=1) is None
    ticket = store.lease_ticket("fresh", engine_version=2)
    assert ticket is not None
    assert ticket.version == 2
    store.return_ticket("fresh", ticket.group_id)
    assert store.lease_ticket("behind", engine_version=1) is None
    again = store.lease_ticket("fresh", engine_version=3)
    assert again is not None
    assert again.task_index == ticket.task_index


def test_seeds_depend_on_the_sample_and_not_on_who_tries_it_or_how_often(make: MakeStore) -> None:
    store = make()
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    assert len(set(ticket.seeds.values())) == 4
    store.release_worker("w0")
    again = store.lease_ticket("w1")
    assert again is not None
    assert (again.task_index, again.seeds, again.attempts) == (0, ticket.seeds, dict.fromkeys(range(4), 2))


def test_tickets_issued_by_hand_take_the_next_task_indices(make: MakeStore) -> None:
    store = make(first_task_index=10, batch_groups=3)
    assert store.issue(3) == ["g000010", "g000011", "g000012"]
    assert [ticket.task_index for ticket in all_tickets(store)] == [10, 11, 12]
    assert store.ledger().issued == 12


# Workers that fail.


def test_a_dead_workers_finished_samples_stay_and_the_others_go_to_its_peer(make: MakeStore, clock: Clock) -> None:
    store = make()
    ticket = store.lease_ticket("dead")
    assert ticket is not None
    store.put("dead", [sample(ticket.group_id, i) for i in (0, 3)])
    unfinished = sample(ticket.group_id, 1, outcome=None)
    assert store.put_progress("dead", [unfinished]) == 1
    clock.now += 59
    assert store.lease_ticket("peer").task_index == 1  # type: ignore[union-attr]
    clock.now += 2
    again = store.lease_ticket("peer")
    assert again is not None
    assert (again.task_index, again.samples_missing) == (0, [1, 2])
    assert again.progress == {1: unfinished}
    assert store.ledger().reissued == {"worker_lost": 2}


def test_heartbeats_hold_only_the_tickets_they_name(make: MakeStore, clock: Clock) -> None:
    store = make()
    kept, lost = all_tickets(store)
    clock.now += 50
    assert store.heartbeat("w0", [kept.group_id]) == []
    clock.now += 50
    assert store.expire() == ([lost.group_id], [])
    assert store.heartbeat("w0", [kept.group_id, lost.group_id]) == [lost.group_id]


def test_no_heartbeat_holds_a_ticket_beyond_its_deadline(make: MakeStore, clock: Clock) -> None:
    store = make(ticket_deadline_s=100.0)
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    for _ in range(6):
        clock.now += 20
        store.heartbeat("w0")
    assert store.expire()[0] == [ticket.group_id]
    assert store.ledger().reissued == {"deadline": 4}


def test_a_ticket_given_back_in_order_costs_no_attempt(make: MakeStore) -> None:
    store = make()
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    assert not store.return_ticket("w1", ticket.group_id)
    assert store.return_ticket("w0", ticket.group_id)
    again = store.lease_ticket("w1")
    assert again is not None
    assert (again.task_index, again.attempts[0]) == (0, 1)


def test_a_worker_thought_dead_delivers_after_all_and_the_first_copy_counts(make: MakeStore) -> None:
    store = make()
    ticket = store.lease_ticket("slow")
    assert ticket is not None
    store.release_worker("slow")
    assert store.lease_ticket("peer").task_index == 0  # type: ignore[union-attr]
    late = [sample(ticket.group_id, i, name=f"late{i}") for i in range(4)]
    assert store.put("slow", late) == ["accepted"] * 4
    assert store.put("peer", [sample(ticket.group_id, 0, name="second")]) == ["duplicate"]
    finish(store, "peer", store.lease_ticket("peer"))  # type: ignore[arg-type]
    batch = store.lease_batch("learner", 2, 0)
    assert batch is not None
    assert [t.id for t in batch.trajectories()[0]] == ["late0", "late1", "late2", "late3"]
    assert store.ledger().puts["duplicate"] == 1


def test_the_failure_of_a_worker_that_lost_its_lease_does_not_disturb_its_peer(make: MakeStore) -> None:
    store = make()
    ticket = store.lease_ticket("slow")
    assert ticket is not None
    store.release_worker("slow")
    store.lease_ticket("peer")
    assert store.put("slow", [sample(ticket.group_id, 0, outcome=Outcome.INFRA_ERROR)]) == ["duplicate"]
    assert store.ledger().running == 4


def test_an_infrastructure_error_is_tried_again_and_given_up_after_max_attempts(make: MakeStore) -> None:
    store = make(max_attempts=3, batch_groups=1)
    for attempt in (1, 2, 3):
        ticket = store.lease_ticket("w0")
        assert ticket is not None
        assert (ticket.task_index, ticket.attempts[1]) == (0, attempt)
        good = [sample(ticket.group_id, i) for i in ticket.samples_missing if i != 1]
        status = store.put("w0", [*good, sample(ticket.group_id, 1, outcome=Outcome.INFRA_ERROR)])[-1]
        assert status == ("dropped" if attempt == 3 else "reissued")
    account = store.ledger()
    assert (account.issued, account.ready, account.dropped) == (4, 3, {"infra_error": 1})
    assert account.reissued == {"infra_error": 2}
    assert account.outcomes == {"answered": 3, "infra_error": 3}


def test_a_batch_of_deliveries_with_one_bad_one_leaves_nothing_behind(make: MakeStore) -> None:
    store = make()
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    good = sample(ticket.group_id, 0)
    with pytest.raises(ValueError, match="g000099 sample 0 was never issued"):
        store.put("w0", [good, sample("g000099", 0)])
    with pytest.raises(ValueError, match="unfinished; use put_progress"):
        store.put("w0", [good, sample(ticket.group_id, 1, outcome=None)])
    with pytest.raises(ValueError, match=r"reward nan .* reward_missing"):
        store.put("w0", [good, sample(ticket.group_id, 1, reward=float("nan"))])
    with pytest.raises(ValueError, match="'mine' was not issued by a replay buffer"):
        store.put("w0", [good, sample("mine", 1)])
    assert store.ledger().arrived == 0
    assert store.ledger().puts == {}


# Groups.


@pytest.mark.parametrize("reward", [0.0, 0.4, 1.0])
def test_a_group_without_spread_is_dropped_and_refilled(make: MakeStore, reward: float) -> None:
    store = make(batch_groups=1)
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    store.put("w0", [sample(ticket.group_id, i, reward=reward) for i in range(4)])
    assert store.ledger().dropped == {"uniform": 4}
    assert store.lease_ticket("w0").task_index == 1  # type: ignore[union-attr]


def work(store: ReplayStore, reward: float | None) -> int | None:
    """One group whose samples all earn `reward` (None: different rewards). Returns its task, None without a ticket."""
    ticket = store.lease_ticket("w0")
    if ticket is None:
        return None
    store.put("w0", [sample(ticket.group_id, i, reward=reward) for i in range(4)])
    return ticket.task_index


def test_batches_stay_full_whatever_is_dropped_and_every_refill_is_accounted_for(make: MakeStore) -> None:
    store = make(batch_groups=2, max_staleness=1, total_groups=4)
    rewards = [0.4, None, 0.0, 0.4, None, 1.0, None, 0.4, None]
    trained: list[int] = []
    for reward in rewards:
        work(store, reward)
        if (batch := store.lease_batch("learner", 2, len(trained) // 2)) is not None:
            assert len(batch.groups) == 2
            trained += [group.task_index for group in batch.groups]
            store.ack(batch.batch_id, len(trained) // 2, len(trained) // 2)
            store.set_version(len(trained) // 2)
    assert trained == [1, 4, 6, 8], "the tasks with spread, in order, none twice"
    account = store.ledger()
    assert (account.issued, account.trained, account.dropped) == (36, 16, {"uniform": 20})
    assert work(store, None) is None, "the run has what it needs"


def test_tasks_that_never_have_spread_are_given_up_with_a_reason(make: MakeStore) -> None:
    store = make(batch_groups=2, max_staleness=1, max_refills=3)
    held = store.lease_ticket("slow")
    assert held is not None
    assert [work(store, 0.4) for _ in range(7)] == [1, 2, 3, 4, 5, 6, None], "3 batches of 2 groups"
    assert store.stats()["groups_fruitless_since_batch"] == 6 and store.stats()["groups_admissible"] == 0
    assert store.no_spread() is None, "a group is still under way"
    store.put("slow", [sample(held.group_id, i) for i in range(4)])
    assert store.lease_batch("learner", 2, 0) is None
    told = store.no_spread() or ""
    assert "6 groups in a row had rewards without spread (buffer.max_refills=3 batches of 2), 1 had some" in told
    assert "buffer.drop_uniform_groups=false" in told
    assert store.ledger().dropped == {"uniform": 24}


def test_tasks_that_never_get_a_reward_are_given_up_with_what_became_of_them(make: MakeStore) -> None:
    """A prompt that leaves no room, a verifier that always raises: without a bound such a run would spin."""
    store = make(batch_groups=2, max_staleness=1, max_refills=2)
    for _ in range(4):
        ticket = store.lease_ticket("w0")
        assert ticket is not None
        store.put("w0", [sample(ticket.group_id, i, outcome=Outcome.REWARD_MISSING) for i in range(4)])
    assert store.lease_ticket("w0") is None
    told = store.no_spread() or ""
    assert "4 of 4 groups in a row" in told and "most trajectories ended as reward_missing" in told


def test_faults_of_the_machinery_are_no_sign_that_tasks_teach_nothing(make: MakeStore) -> None:
    store = make(batch_groups=1, max_staleness=0, max_refills=1, max_attempts=1)
    for _ in range(3):
        ticket = store.lease_ticket("w0")
        assert ticket is not None
        store.put("w0", [sample(ticket.group_id, i, outcome=Outcome.INFRA_ERROR) for i in range(4)])
    assert store.no_spread() is None and store.lease_ticket("w0") is not None


def test_the_count_of_groups_without_spread_begins_anew_with_a_batch_and_survives_a_restart(make: MakeStore) -> None:
    chosen = {"batch_groups": 1, "max_staleness": 0, "max_refills": 2}
    store = make(**chosen)
    assert [work(store, 0.0), work(store, None)] == [0, 1]
    train(store, 1, step=1, version=0)
    assert [work(store, 0.0), work(store, 1.0), work(store, None)] == [2, 3, None]
    store = make(**chosen)
    assert store.lease_ticket("w0") is None and store.no_spread() is not None
    store.rollback_to(1, 1)  # what a resumed run does
    assert store.no_spread() is None and work(store, None) == 4


def test_a_group_without_spread_is_kept_when_the_filter_is_off(make: MakeStore) -> None:
    store = make(batch_groups=1, drop_uniform_groups=False)
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    store.put("w0", [sample(ticket.group_id, i, reward=0.4) for i in range(4)])
    assert store.lease_batch("learner", 1, 0) is not None


def test_spread_is_judged_on_everything_a_trajectory_earned(make: MakeStore) -> None:
    store = make(batch_groups=1)
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    members = [sample(ticket.group_id, i, reward=1.0) for i in range(4)]
    members[2].turns[0].rewards = {"format": -0.1}
    store.put("w0", members)
    assert store.ledger().ready == 4


def test_a_group_goes_on_without_samples_whose_reward_is_missing(make: MakeStore) -> None:
    store = make(batch_groups=1)
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    outcomes = [Outcome.ANSWERED, Outcome.REWARD_MISSING, Outcome.LENGTH, Outcome.REWARD_MISSING]
    statuses = store.put("w0", [sample(ticket.group_id, i, reward=i, outcome=o) for i, o in enumerate(outcomes)])
    assert statuses == ["accepted", "dropped", "accepted", "dropped"]
    batch = store.lease_batch("learner", 1, 0)
    assert batch is not None
    assert [t.sample_index for t in batch.trajectories()[0]] == [0, 2]
    assert store.ledger().dropped == {"reward_missing": 2}


def test_a_group_with_one_member_left_is_dropped(make: MakeStore) -> None:
    store = make(batch_groups=1)
    ticket = store.lease_ticket("w0")
    assert ticket is not None
    outcomes = [Outcome.ANSWERED] + [Outcome.REWARD_MISSING] * 3
    store.put("w0", [sample(ticket.group_id, i, outcome=o) for i, o in enumerate(outcomes)])
    assert store.ledger().dropped == {"reward_missing": 3, "too_few": 1}
    assert store.put("w0", [sample(ticket.group_id, 1)]) == ["closed"]


def test_groups_of_one_have_no_spread_to_be_judged_by(make: MakeStore) -> None:
    store = make(group_size=1, batch_groups=1)
    finish(store, "w0", store.lease_ticket("w0"))  # type: ignore[arg-type]
    assert store.lease_batch("learner", 1, 0) is not None


# Across processes and files.


def test_everything_survives_closing_and_opening_the_file(make: MakeStore, clock: Clock, tmp_path: Path) -> None:
    store = make()
    first, second = all_tickets(store)
    finish(store, "w0", first)
    store.put("w0", [sample(second.group_id, 0)])
    before = store.ledger()
    clock.now += 1000
    again = make()
    assert again.ledger() == before
    assert again.expire() == ([], []), "nobody could send a heartbeat while it was closed"
    assert again.put("w0", [sample(second.group_id, i) for i in (0, 1, 2, 3)])[0] == "duplicate"
    assert train(again, 2, 1, 0) == [0, 1]
    assert read_ledger(tmp_path / "replay.db").trained == 8
    assert [t.group_id for t in read_trajectories(tmp_path / "replay.db")] == ["g000000"] * 4 + ["g000001"] * 4


def test_payloads_of_old_steps_are_freed_and_their_place_is_used_again(make: MakeStore, tmp_path: Path) -> None:
    store = make(keep_trained_steps=2)
    sizes = []
    for version in range(12):
        for ticket in all_tickets(store):
            members = [sample(ticket.group_id, i, versions=[version] * 4000) for i in range(4)]
            store.put("w0", members)
        train(store, 2, version + 1, version)
        sizes.append(store.stats()["file_bytes"])
    kept = {t.group_id for t in read_trajectories(tmp_path / "replay.db")}
    assert kept == {f"g{task:06d}" for task in range(20, 24)}
    assert sizes[-1] <= sizes[4] * 1.1
    assert store.trained_task_indices() == list(range(24))


def test_the_text_says_for_whom_a_batch_waits(make: MakeStore, clock: Clock) -> None:
    store = make(batch_groups=3)
    tickets = all_tickets(store)
    finish(store, "w0", tickets[0])
    store.put("w0", [sample(tickets[1].group_id, i) for i in (0, 2)])
    clock.now += 42
    store.heartbeat("w0")
    store.return_ticket("w0", tickets[2].group_id)
    text = store.waiting_for()
    assert "1 groups ready, 3 wanted; 1 at workers, 1 waiting for a worker, 0 more may be issued" in text
    assert "g000001: 2 of 4 samples missing (1, 3); at worker w0 for 42 s, heard from 0 s ago" in text
    assert "g000002: 4 of 4 samples missing (0, 1, 2, 3); no worker has it" in text


def test_settings_follow_the_runs_config() -> None:
    config = RunConfig()
    config.loop.steps, config.loop.groups_per_step = 7, 3
    settings = ReplaySettings.of(config)
    assert (settings.total_groups, settings.batch_groups, settings.max_outstanding_groups) == (21, 3, 6)


def test_senseless_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_staleness is -1"):
        ReplaySettings(max_staleness=-1)
    with pytest.raises(ValueError, match="group_size is 0"):
        ReplaySettings(group_size=0)
    with pytest.raises(UnknownName, match="did you mean 'fifo'"):
        ReplayStore(tmp_path / "x.db", ReplaySettings(sampling="fifi"))
    with pytest.raises(FileNotFoundError, match="no replay buffer at"):
        read_ledger(tmp_path / "none.db")
