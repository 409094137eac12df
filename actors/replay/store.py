"""`ReplayStore`: the durable account and payload of a run's samples, one SQLite file. No Ray here.

Every method is one transaction: it happened whole or not at all, whenever the process is killed. Not thread-safe: one
caller at a time (the actor sees to that). The clock is wall time, because leases outlive the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.replay import batches, report, rewards, rollback, tickets
from actors.replay.database import Transaction, connect, create, transaction
from actors.replay.policies import sampling_policies
from actors.replay.records import (
    Batch,
    Entry,
    PutStatus,
    ReplaySettings,
    Ticket,
    entries_of,
    group_name,
    task_index_of,
)
from actors.replay.rewards import AwaitedReward, RewardAnswer
from toolrl.ledger import Ledger
from toolrl.trajectory import Trajectory


class ReplayStore:
    """See the module. Opening an existing file goes on where it was left.

    Raises:
        UnknownName: a sampling policy that does not exist.
        ValueError: settings or a file that make no sense.
    """

    def __init__(self, path: str | Path, settings: ReplaySettings, clock: Callable[[], float] = time.time) -> None:
        sampling_policies.get(settings.sampling)
        self.path = Path(path)
        self.settings = settings
        self._clock = clock
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._db = connect(self.path)
        create(self._db, settings)
        with self._transaction() as tx:
            self._renew_leases(tx)

    def _renew_leases(self, tx: Transaction) -> None:
        """While the store was down nobody could send a heartbeat, so nobody may lose a lease for that."""
        tx.db.execute(
            "UPDATE groups SET lease_until = max(lease_until, ?) WHERE state = 'generating'",
            (tx.now + self.settings.worker_lease_s,),
        )
        tx.db.execute(
            "UPDATE batches SET lease_until = max(lease_until, ?) WHERE state = 'leased'",
            (tx.now + self.settings.learner_lease_s,),
        )
        rewards.renew(tx)

    @contextmanager
    def _transaction(self) -> Iterator[Transaction]:
        with transaction(self._db, self.settings, self._clock()) as tx:
            yield tx

    def close(self) -> None:
        self._db.close()

    # The worker's side.

    def issue(self, n_groups: int) -> list[str]:
        """Makes n tickets with the next task indices at once, admissible or not. Returns their group ids.

        `lease_ticket` issues by itself what is admissible; this is for those who fill the queue by hand.
        """
        with self._transaction() as tx:
            return [group_name(task) for task in tickets.issue(tx, n_groups)]

    def lease_ticket(self, worker: str, *, engine_version: int | None = None) -> Ticket | None:
        """A ticket for the worker, or None: nothing to do now. See `tickets.lease`."""
        with self._transaction() as tx:
            tickets.expire(tx)
            return tickets.lease(tx, worker, engine_version)

    def heartbeat(self, worker: str, group_ids: Sequence[str] | None = None) -> list[str]:
        """Prolongs the worker's leases on these groups. Returns those among them that are no longer its own."""
        with self._transaction() as tx:
            return tickets.heartbeat(tx, worker, group_ids)

    def return_ticket(self, worker: str, group_id: str) -> bool:
        """Gives back what is unfinished of a ticket, without blame. False when the worker does not hold it."""
        with self._transaction() as tx:
            task = task_index_of(group_id)
            row = tx.db.execute("SELECT state, worker FROM groups WHERE task = ?", (task,)).fetchone()
            if row is None or row["state"] != "generating" or row["worker"] != worker:
                return False
            tickets.give_back(tx, task, None)
            return True

    def release_worker(self, worker: str) -> list[str]:
        """Takes back all tickets of a worker that is known to be dead. Returns their group ids."""
        with self._transaction() as tx:
            held = tx.db.execute(
                "SELECT task FROM groups WHERE state = 'generating' AND worker = ?", (worker,)
            ).fetchall()
            for row in held:
                tickets.give_back(tx, row["task"], "worker_lost")
            return [group_name(row["task"]) for row in held]

    def put(self, worker: str, finished: Sequence[Trajectory | Entry]) -> list[PutStatus]:
        """Takes in finished trajectories, all in one transaction; says what became of each.

        Raises:
            ValueError: one of them contradicts itself, is unfinished, or was never issued. Then none is taken.
        """
        entries = entries_of(finished)
        with self._transaction() as tx:
            return tickets.put(tx, worker, entries)

    def put_progress(self, worker: str, unfinished: Sequence[Trajectory | Entry]) -> int:
        """Stores unfinished episodes at a turn boundary, for whoever gets the ticket next. Returns how many it kept."""
        entries = entries_of(unfinished)
        with self._transaction() as tx:
            return tickets.put_progress(tx, worker, entries)

    # The reward workers' side.

    def claim_unrewarded(self, name: str, *, limit: int = 16, claim_s: float = 60.0) -> list[AwaitedReward]:
        """Trajectories that wait for the reward `name`; for `claim_s` nobody else is given them."""
        with self._transaction() as tx:
            return rewards.claim(tx, name, limit, claim_s)

    def deliver_reward(self, trajectory_id: str, name: str, value: Any) -> RewardAnswer:
        """A late reward: a number for the trajectory, or a list with one a policy turn. Never raises for a wrong one.

        Args:
            trajectory_id: `AwaitedReward.trajectory_id`, or `toolrl.rewards.reward_id` of the trajectory.
            value: not weighted yet.
        """
        with self._transaction() as tx:
            return rewards.take_in(tx, trajectory_id, name, value)

    # The learner's side.

    def lease_batch(
        self, learner: str, n_groups: int, learner_version: int, *, patient: bool = True, request: str | None = None
    ) -> Batch | None:
        """A batch of exactly n complete groups, or None when there is none yet.

        Args:
            patient: False: do not wait for groups that will be too old later, and close groups without their missing
                samples.
            request: a name of this request; asking again with it gets the same batch while it is leased.
        """
        with self._transaction() as tx:
            batches.expire(tx)
            tickets.expire(tx)
            rewards.expire(tx)
            return batches.lease(tx, learner, n_groups, learner_version, patient=patient, request=request)

    def heartbeat_batch(self, batch_id: int) -> bool:
        """Prolongs the learner's lease. False: it is lost."""
        with self._transaction() as tx:
            return batches.heartbeat(tx, batch_id)

    def ack(self, batch_id: int, step: int, version: int) -> bool:
        """The batch was trained in `step`, which made the weights `version` (they may not be published yet).

        Returns:
            False when it had been acknowledged before.

        Raises:
            LeaseLost: the batch was taken back and something else became of it; the step must not count.
        """
        with self._transaction() as tx:
            return batches.ack(tx, batch_id, step, version)

    def reject(self, batch_id: int, reason: str) -> bool:
        """The batch is not to be trained, now or later. See `batches.reject`."""
        with self._transaction() as tx:
            return batches.reject(tx, batch_id, reason)

    def nack(self, batch_id: int) -> bool:
        """Gives a batch back untrained. False when it was not leased."""
        with self._transaction() as tx:
            return batches.take_back(tx, batch_id)

    def set_version(self, version: int) -> None:
        """These weights are published now: engines serve them, new tickets ask for them.

        Raises:
            ValueError: a version older than the published one.
        """
        with self._transaction() as tx:
            if version < tx.meta("version"):
                raise ValueError(
                    f"version {version} after version {tx.meta('version')}: published versions only rise; "
                    "to go back to a checkpoint use rollback_to"
                )
            tx.set_meta("version", version)

    def admit(self, is_open: bool) -> None:
        """Whether tickets are given out. What workers hold already they finish and deliver."""
        with self._transaction() as tx:
            tx.set_meta("closed", int(not is_open))

    def rollback_to(self, step: int, version: int) -> dict[str, int]:
        """Back to the checkpoint of `step` with weights `version`. See `rollback.rollback_to`."""
        with self._transaction() as tx:
            return rollback.rollback_to(tx, step, version)

    def expire(self) -> tuple[list[str], list[int]]:
        """Takes back what silent workers and learners hold, and waits for late rewards no longer than their deadline.

        Returns:
            Group ids and batch ids that were taken back.
        """
        with self._transaction() as tx:
            rewards.expire(tx)
            return tickets.expire(tx), batches.expire(tx)

    # Reports.

    def ledger(self) -> Ledger:
        with self._transaction() as tx:
            return report.ledger(tx.db)

    def audit(self) -> list[str]:
        """What does not agree with itself in the account; empty when it is sound."""
        with self._transaction() as tx:
            return report.audit(tx.db)

    def stats(self) -> dict[str, float]:
        with self._transaction() as tx:
            return report.stats(tx)

    def waiting_for(self) -> str:
        with self._transaction() as tx:
            return report.waiting_for(tx)

    def no_spread(self) -> str | None:
        """Why no batch will ever come: too many groups in a row without spread. None while there is hope."""
        with self._transaction() as tx:
            return report.no_spread(tx)

    def trained_task_indices(self) -> list[int]:
        with self._transaction() as tx:
            return report.trained_task_indices(tx.db)
