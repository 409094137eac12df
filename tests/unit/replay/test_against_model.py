"""Random histories: after every operation, failed ones included, the store and the model agree and the account
balances.

Faults: an operation is interrupted somewhere inside SQLite and repeated; the file is closed and opened again; clocks
jump; workers and learners fall silent; deliveries come late, twice, or from workers that have lost their lease.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.replay import Entry, LeaseLost, ReplaySettings, ReplayStore
from tests.replay_model import Model, counts_of
from tests.replay_samples import Clock, sample
from toolrl.trajectory import Outcome

T = TypeVar("T")
WORKERS = st.sampled_from(["w0", "w1"])
OUTCOMES = st.sampled_from([*[Outcome.ANSWERED] * 6, *Outcome])
REWARDS = st.sampled_from([0.0, 0.4, 1.0])
LAGS = st.sampled_from([0, 0, 0, 1, 2])


class StoreAgainstModel(RuleBasedStateMachine):
    @initialize(
        staleness=st.integers(0, 2),
        groups=st.integers(1, 2),
        size=st.integers(2, 3),
        uniform=st.booleans(),
        total=st.none() | st.integers(2, 8),
        refills=st.integers(1, 3),
    )
    def open(self, staleness: int, groups: int, size: int, uniform: bool, total: int | None, refills: int) -> None:
        self.settings = ReplaySettings(
            group_size=size,
            batch_groups=groups,
            total_groups=total,
            max_staleness=staleness,
            drop_uniform_groups=uniform,
            max_refills=refills,
            max_attempts=3,
            worker_lease_s=60.0,
            learner_lease_s=100.0,
            keep_trained_steps=10_000,
        )
        self.folder = tempfile.mkdtemp()
        self.clock = Clock()
        self.store = ReplayStore(Path(self.folder) / "r.db", self.settings, self.clock)
        self.model = Model(self.settings, now=self.clock.now)
        self.interrupt_after = 0
        self.step = 0
        self.deliveries = 0
        self.acked: Counter[int] = Counter()

    def call(self, operation: Callable[[], T]) -> T:
        """Runs an operation, once interrupted after some steps of SQLite's machine if a fault is due, and then in
        full."""
        if self.interrupt_after:
            database, before = self.store._db, counts_of(self.store.ledger())
            once = iter([1])
            database.set_progress_handler(lambda: next(once, 0), self.interrupt_after)
            self.interrupt_after = 0
            try:
                return operation()
            except sqlite3.OperationalError:
                database.set_progress_handler(None, 0)
                assert counts_of(self.store.ledger()) == before, "an interrupted operation left something behind"
            finally:
                database.set_progress_handler(None, 0)
        return operation()

    # Workers.

    @rule(worker=WORKERS, behind=st.none() | LAGS)
    def lease_a_ticket(self, worker: str, behind: int | None) -> None:
        self.lease_ticket(worker, behind)

    @rule(worker=WORKERS, data=st.data(), lag=LAGS)
    def work_off_a_ticket(self, worker: str, data: st.DataObject, lag: int) -> None:
        task = self.lease_ticket(worker, 0)
        if task is not None:
            rewards = data.draw(st.permutations([0.0, 0.4, 1.0]))[: self.settings.group_size]
            self.put(worker, task, [(i, Outcome.ANSWERED, reward) for i, reward in enumerate(rewards)], lag)

    def lease_ticket(self, worker: str, behind: int | None) -> int | None:
        engine = None if behind is None else max(0, self.model.version - behind)
        self.model.expire_tickets()
        expected = self.model.next_ticket(engine)
        ticket = self.call(lambda: self.store.lease_ticket(worker, engine_version=engine))
        self.model.fenced.discard(worker)
        if expected is None:
            assert ticket is None
            return None
        assert ticket is not None
        assert (ticket.task_index, ticket.samples_missing) == expected
        group = self.model.lease(worker, ticket.task_index, engine)
        progress = {i: s.progress for i, s in enumerate(group.samples) if s.progress is not None}
        handed_on = {i: Entry.of(trajectory).payload for i, trajectory in ticket.progress.items()}
        assert handed_on == {i: entry.payload for i, entry in progress.items()}
        assert ticket.attempts == {i: group.samples[i].attempt for i in ticket.samples_missing}
        return ticket.task_index

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), worker=WORKERS, outcome=OUTCOMES, lag=LAGS)
    def deliver_something(self, data: st.DataObject, worker: str, outcome: Outcome, lag: int) -> None:
        held = [group.task for group in self.model.groups if group.worker == worker]
        task = data.draw(st.sampled_from(held or range(len(self.model.groups))))
        indices = data.draw(st.lists(st.integers(0, self.settings.group_size - 1), min_size=1, max_size=3))
        self.put(worker, task, [(index, outcome, data.draw(REWARDS)) for index in indices], lag)

    def put(self, worker: str, task: int, what: list[tuple[int, Outcome, float]], lag: int) -> None:
        versions = (max(0, self.model.version - lag), self.model.version)
        entries = []
        for index, outcome, reward in what:
            self.deliveries += 1
            name = f"delivery {self.deliveries}"
            finished = sample(f"g{task:06d}", index, versions=versions, reward=reward, outcome=outcome, name=name)
            entries.append(Entry.of(finished))
        statuses = self.call(lambda: self.store.put(worker, entries))
        assert statuses == [self.model.put(worker, entry, task) for entry in entries]
        group = self.model.groups[task]
        if group.trained is None and not group.leased and "fenced" not in statuses:
            self.model.settle(group)

    @precondition(lambda self: self.model.of("generating"))
    @rule(data=st.data(), worker=WORKERS)
    def put_progress(self, data: st.DataObject, worker: str) -> None:
        group = data.draw(st.sampled_from(self.model.of("generating")))
        index = data.draw(st.integers(0, self.settings.group_size - 1))
        member = group.samples[index]
        entry = Entry.of(sample(f"g{group.task:06d}", index, versions=[self.model.version], outcome=None))
        useful = member.state in ("waiting", "running") and group.worker == worker and worker not in self.model.fenced
        assert self.call(lambda: self.store.put_progress(worker, [entry])) == int(useful)
        if useful:
            member.progress = entry

    @rule(worker=WORKERS)
    def heartbeat(self, worker: str) -> None:
        assert self.call(lambda: self.store.heartbeat(worker)) == []
        for group in self.model.of("generating"):
            if group.worker == worker:
                group.lease_until = self.model.now + self.settings.worker_lease_s

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), worker=WORKERS)
    def return_ticket(self, data: st.DataObject, worker: str) -> None:
        group = data.draw(st.sampled_from(self.model.groups))
        holds = group.state == "generating" and group.worker == worker
        assert self.call(lambda: self.store.return_ticket(worker, f"g{group.task:06d}")) is holds
        if holds:
            self.model.give_back(group, None)

    @rule(worker=WORKERS)
    def release_worker(self, worker: str) -> None:
        held = [group for group in self.model.of("generating") if group.worker == worker]
        released = self.call(lambda: self.store.release_worker(worker))
        assert released == [f"g{group.task:06d}" for group in held]
        for group in held:
            self.model.give_back(group, "worker_lost")

    # The learner.

    @rule(n=st.integers(1, 2), patient=st.sampled_from([True, True, False]))
    def lease_a_batch(self, n: int, patient: bool) -> None:
        self.lease_batch(n, patient)

    @rule()
    def train_a_step(self) -> None:
        batch = self.lease_batch(self.settings.batch_groups, True)
        if batch is not None:
            self.ack(batch, publish=True)

    def lease_batch(self, n: int, patient: bool) -> int | None:
        version = self.model.version
        self.model.expire_batches()
        self.model.expire_tickets()
        self.model.reissue_stale(version)
        expected = self.model.next_batch(n, version, patient)
        batch = self.call(lambda: self.store.lease_batch("learner", n, version, patient=patient))
        if expected is None:
            assert batch is None
            return None
        assert batch is not None
        assert [group.task_index for group in batch.groups] == expected
        self.model.fruitless_since_batch = 0
        self.model.batches[batch.batch_id] = "leased"
        self.model.batch_until[batch.batch_id] = self.model.now + self.settings.learner_lease_s
        self.model.batch_tasks[batch.batch_id] = expected
        for found in batch.groups:
            group = self.model.groups[found.task_index]
            group.leased, group.batch = True, batch.batch_id
            assert found.payloads == [s.entry.payload for s in group.alive if s.entry is not None]
            oldest = [s.entry.oldest_version or 0 for s in group.alive if s.entry is not None]
            assert version - min(oldest) <= self.settings.max_staleness
        return batch.batch_id

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data(), publish=st.booleans())
    def acknowledge_some_batch(self, data: st.DataObject, publish: bool) -> None:
        self.ack(data.draw(st.sampled_from(sorted(self.model.batches))), publish)

    def ack(self, number: int, publish: bool) -> None:
        tasks, state = self.model.batch_tasks[number], self.model.batches[number]
        groups = [self.model.groups[task] for task in tasks]
        intact = all(group.batch == number and group.state in ("leased", "ready") for group in groups)
        made = self.model.version + 1
        if state != "acked" and not intact:
            with pytest.raises(LeaseLost):
                self.call(lambda: self.store.ack(number, self.step + 1, made))
            return
        assert self.call(lambda: self.store.ack(number, self.step + 1, made)) is (state != "acked")
        if state != "acked":
            self.step += 1
            self.model.batches[number] = "acked"
            for group in groups:
                group.leased, group.trained = False, (self.step, made)
            if publish:
                self.publish()

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.model.batches)))
        groups = [self.model.groups[task] for task in self.model.batch_tasks[number]]
        state = self.model.batches[number]
        intact = all(group.batch == number and group.state in ("leased", "ready") for group in groups)
        if state != "rejected" and not intact:
            with pytest.raises(LeaseLost):
                self.call(lambda: self.store.reject(number, "rejected"))
            return
        assert self.call(lambda: self.store.reject(number, "rejected")) is (state != "rejected")
        if state != "rejected":
            self.model.reject(number, "rejected")

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def nack(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.model.batches)))
        leased = self.model.batches[number] == "leased"
        assert self.call(lambda: self.store.nack(number)) is leased
        if leased:
            self.model.take_back(number)

    @precondition(lambda self: any(group.trained for group in self.model.groups))
    @rule()
    def publish(self) -> None:
        self.model.version += 1
        self.call(lambda: self.store.set_version(self.model.version))

    # What goes wrong.

    @rule(seconds=st.sampled_from([1.0, 1.0, 30.0, 61.0, 101.0]), expire=st.booleans())
    def time_passes(self, seconds: float, expire: bool) -> None:
        self.clock.now += seconds
        self.model.now = self.clock.now
        if expire:
            late = [f"g{task:06d}" for task in self.model.expire_tickets()], self.model.expire_batches()
            assert self.call(self.store.expire) == late

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = ReplayStore(Path(self.folder) / "r.db", self.settings, self.clock)
        for group in self.model.of("generating"):
            group.lease_until = max(group.lease_until, self.model.now + self.settings.worker_lease_s)
        for batch in self.model.batches:
            until = self.model.now + self.settings.learner_lease_s
            self.model.batch_until[batch] = max(self.model.batch_until[batch], until)

    @precondition(lambda self: self.step >= 2)
    @rule(steps=st.integers(0, 3), versions=st.integers(0, 3))
    def rollback(self, steps: int, versions: int) -> None:
        step, version = max(0, self.step - steps), max(0, self.model.version - versions)
        self.model.fenced |= {"w0", "w1"} & self.seen
        untrained, reissued = self.model.rollback(step, version)
        found = self.call(lambda: self.store.rollback_to(step, version))
        assert found == {"untrained": untrained, "reissued": reissued}
        self.step = step

    @rule(after=st.integers(1, 400))
    def interrupt_the_next_operation(self, after: int) -> None:
        self.interrupt_after = after

    @property
    def seen(self) -> set[str]:
        """Workers that the store has heard of."""
        return {row["worker"] for row in self.store._db.execute("SELECT worker FROM workers")}

    @invariant()
    def the_account_balances_and_agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        ledger = self.store.ledger()
        assert ledger.balances
        assert self.store.audit() == []
        assert counts_of(ledger) == self.model.counts()
        assert ledger.reissued == {reason: n for reason, n in self.model.reissued.items() if n}
        trained = self.store.trained_task_indices()
        assert len(set(trained)) == len(trained)
        assert sorted(trained) == sorted(group.task for group in self.model.of("trained"))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder, ignore_errors=True)


StoreAgainstModel.TestCase.settings = hypothesis_settings(max_examples=30, stateful_step_count=50, deadline=None)
test_store_and_model_agree_on_any_history = StoreAgainstModel.TestCase
