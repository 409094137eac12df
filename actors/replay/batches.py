"""The learner's side: leasing batches of complete groups, and what becomes of them.

Invariants:
- A group is in at most one live batch, and is trained by exactly one acknowledgement, or dropped with its batch.
- No batch holds a token older than `max_staleness` versions: what is too old goes back to the queue under its task
  index.
- An acknowledgement that comes after the lease ran out counts if all of the batch is still untouched, else it raises
  LeaseLost.
"""

from __future__ import annotations

import sqlite3

from actors.replay import rewards
from actors.replay.database import Transaction
from actors.replay.groups import begin_count_anew, drop_group, drop_sample, settle, try_again
from actors.replay.policies import Candidate, Demand, sampling_policies
from actors.replay.records import Batch, BatchGroup, LeaseLost, group_name


def lease(
    tx: Transaction, learner: str, n_groups: int, learner_version: int, *, patient: bool, request: str | None
) -> Batch | None:
    """A batch of n groups by the sampling policy, or None when it has to wait."""
    if request is not None:
        row = tx.db.execute("SELECT batch FROM batches WHERE request = ? AND state = 'leased'", (request,)).fetchone()
        if row is not None:
            return _batch(tx, row["batch"])
    reissue_stale(tx, learner_version)
    demand = Demand(n_groups, learner_version, tx.settings.max_staleness, patient)
    chosen = _choose(tx, demand)
    if chosen is None and not patient:
        close_late_groups(tx, n_groups)
        chosen = _choose(tx, demand)
    if chosen is None:
        return None
    done = tx.db.execute(
        "INSERT INTO batches (learner, request, state, leased_at, lease_until, groups)"
        " VALUES (?, ?, 'leased', ?, ?, ?)",
        (learner, request, tx.now, tx.now + tx.settings.learner_lease_s, len(chosen)),
    )
    batch = int(done.lastrowid or 0)
    begin_count_anew(tx)
    for group in chosen:
        tx.db.execute("UPDATE groups SET state = 'leased', batch = ? WHERE task = ?", (batch, group.task_index))
        _move_samples(tx, group.task_index, "ready", "leased")
    return _batch(tx, batch)


def reissue_stale(tx: Transaction, learner_version: int) -> None:
    """Sends finished samples with tokens beyond the bound back to be generated anew."""
    rows = tx.db.execute(
        "SELECT s.task, s.sample FROM groups g JOIN samples s ON s.task = g.task"
        " WHERE g.state IN ('ready', 'unrewarded') AND s.state IN ('ready', 'arrived', 'unrewarded')"
        " AND s.oldest_version < ?",
        (learner_version - tx.settings.max_staleness,),
    ).fetchall()
    for row in rows:
        try_again(tx, row["task"], row["sample"], "stale", keep_progress=False)
    for task in {row["task"] for row in rows}:
        tx.db.execute("UPDATE groups SET min_version = ? WHERE task = ?", (tx.meta("version"), task))
        settle(tx, task)


def close_late_groups(tx: Transaction, n_groups: int) -> None:
    """Lets unfinished groups go on without their missing samples, oldest first, until n groups are ready."""
    late = tx.db.execute(
        "SELECT task FROM groups g WHERE state IN ('waiting', 'generating', 'unrewarded') AND ? <="
        " (SELECT count(*) FROM samples s WHERE s.task = g.task AND s.state = 'arrived') ORDER BY task",
        (tx.settings.min_members,),
    ).fetchall()
    for row in late:
        (ready,) = tx.db.execute("SELECT count(*) FROM groups WHERE state = 'ready'").fetchone()
        if ready >= n_groups:
            return
        missing = tx.db.execute(
            "SELECT sample, state FROM samples WHERE task = ? AND state IN ('waiting', 'running', 'unrewarded')",
            (row["task"],),
        ).fetchall()
        for sample in missing:
            if sample["state"] == "unrewarded":
                rewards.give_up(tx, row["task"], sample["sample"])
            else:
                drop_sample(tx, row["task"], sample["sample"], "late")
        settle(tx, row["task"])


def _choose(tx: Transaction, demand: Demand) -> list[Candidate] | None:
    policy = sampling_policies.get(tx.settings.sampling)
    unfinished = _candidates(tx, "('waiting', 'generating', 'unrewarded')")
    return policy(_candidates(tx, "('ready')"), unfinished, demand)


def _candidates(tx: Transaction, states: str) -> list[Candidate]:
    """Groups in one of the states. A sample at a worker counts with `min_version`, a finished one with its own tokens;
    one that no worker has can still be begun with the next version."""
    next_version = tx.meta("version") + 1
    rows = tx.db.execute(
        "SELECT g.task, g.ready_order, min(CASE s.state WHEN 'waiting' THEN ? WHEN 'running' THEN g.min_version"
        " ELSE coalesce(s.oldest_version, ?) END) AS oldest"
        " FROM groups g JOIN samples s ON s.task = g.task"
        f" WHERE g.state IN {states} AND s.state NOT LIKE 'dropped%' GROUP BY g.task",
        (next_version, next_version),
    )
    return [Candidate(row["task"], row["ready_order"], row["oldest"]) for row in rows]


def _batch(tx: Transaction, batch: int) -> Batch:
    rows = tx.db.execute(
        "SELECT g.task, p.data FROM groups g JOIN samples s ON s.task = g.task AND s.state = 'leased'"
        " JOIN payloads p ON p.task = s.task AND p.sample = s.sample WHERE g.batch = ? ORDER BY g.task, s.sample",
        (batch,),
    )
    groups: dict[int, BatchGroup] = {}
    for row in rows:
        group = groups.setdefault(row["task"], BatchGroup(group_name(row["task"]), row["task"], []))
        group.payloads.append(row["data"])
    return Batch(batch, list(groups.values()))


def ack(tx: Transaction, batch: int, step: int, version: int) -> bool:
    """Marks a batch as trained. Returns False when it was already.

    Raises:
        LeaseLost: the lease ran out and something else became of one of its groups.
    """
    row = _row(tx, batch)
    if row["state"] == "acked":
        return False
    held, tasks = _untouched(tx, row)
    for task in tasks:
        tx.db.execute(
            "UPDATE groups SET state = 'trained', trained_step = ?, trained_version = ? WHERE task = ?",
            (step, version, task),
        )
        _move_samples(tx, task, held, "trained")
    tx.db.execute("UPDATE batches SET state = 'acked', step = ? WHERE batch = ?", (step, batch))
    prune(tx, step)
    return True


def reject(tx: Transaction, batch: int, reason: str) -> bool:
    """Drops a batch's groups for good instead of training them; new tasks take their place. Returns False when they were
    dropped already.

    Raises:
        LeaseLost: the lease ran out and something else became of one of its groups, or it was trained.
    """
    row = _row(tx, batch)
    if row["state"] == "rejected":
        return False
    _, tasks = _untouched(tx, row)
    for task in tasks:
        drop_group(tx, task, reason)
    tx.db.execute("UPDATE batches SET state = 'rejected' WHERE batch = ?", (batch,))
    return True


def _row(tx: Transaction, batch: int) -> sqlite3.Row:
    row: sqlite3.Row | None = tx.db.execute("SELECT * FROM batches WHERE batch = ?", (batch,)).fetchone()
    if row is None:
        raise LeaseLost(f"batch {batch} was never leased")
    return row


def _untouched(tx: Transaction, row: sqlite3.Row) -> tuple[str, list[int]]:
    """The state of the batch's groups and their tasks. Raises LeaseLost unless nothing became of any of them."""
    held = "leased" if row["state"] == "leased" else "ready"
    found = tx.db.execute("SELECT task FROM groups WHERE batch = ? AND state = ?", (row["batch"], held)).fetchall()
    if len(found) != row["groups"]:
        raise LeaseLost(
            f"batch {row['batch']} of {row['learner']} was taken back and {row['groups'] - len(found)} of its"
            f" {row['groups']} groups went elsewhere; discard the step, or raise buffer.learner_lease_s above the length"
            " of a step"
        )
    return held, [group["task"] for group in found]


def prune(tx: Transaction, step: int) -> None:
    """Frees the payloads of groups trained long ago; their rows stay, for the account."""
    rewards.forget(tx)
    done, until = tx.meta("pruned_to_step"), step - tx.settings.keep_trained_steps
    if until > done:
        tx.db.execute(
            "DELETE FROM payloads WHERE task IN (SELECT task FROM groups WHERE trained_step > ? AND trained_step <= ?)",
            (done, until),
        )
        tx.set_meta("pruned_to_step", until)


def take_back(tx: Transaction, batch: int) -> bool:
    """Returns a leased batch's groups to `ready`. False when there was nothing to return."""
    done = tx.db.execute("UPDATE batches SET state = 'returned' WHERE batch = ? AND state = 'leased'", (batch,))
    if not done.rowcount:
        return False
    for row in tx.db.execute("SELECT task FROM groups WHERE batch = ? AND state = 'leased'", (batch,)).fetchall():
        tx.db.execute("UPDATE groups SET state = 'ready' WHERE task = ?", (row["task"],))
        _move_samples(tx, row["task"], "leased", "ready")
    return True


def heartbeat(tx: Transaction, batch: int) -> bool:
    """Prolongs a batch's lease. False when it is no longer leased."""
    done = tx.db.execute(
        "UPDATE batches SET lease_until = ? WHERE batch = ? AND state = 'leased'",
        (tx.now + tx.settings.learner_lease_s, batch),
    )
    return bool(done.rowcount)


def expire(tx: Transaction) -> list[int]:
    """Takes back the batches of silent learners. Returns their ids."""
    late = tx.db.execute("SELECT batch FROM batches WHERE state = 'leased' AND lease_until < ?", (tx.now,)).fetchall()
    for row in late:
        take_back(tx, row["batch"])
    return [row["batch"] for row in late]


def _move_samples(tx: Transaction, task: int, before: str, after: str) -> None:
    tx.db.execute("UPDATE samples SET state = ? WHERE task = ? AND state = ?", (after, task, before))
