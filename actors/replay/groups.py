"""How a sample and its group change state. Every rule about when a group is complete, ready or dropped is here.

    waiting ──lease──▶ running ──put──▶ arrived ──group complete──▶ ready ──lease──▶ leased ──ack──▶ trained
       ▲                  │                                           │                │
       └──── re-issue ────┴──────────────── too old ──────────────────┘◀─ nack, expiry ┘
    and from any of them but trained: dropped:REASON

Invariants: a group is `generating` exactly when one of its samples is `running`; `waiting` when none is running and one
is waiting; otherwise it is settled: `ready`, `leased`, `trained` or `dropped`.
"""

from __future__ import annotations

import statistics

from actors.replay.database import Transaction

UNIFORM_STD = 1e-8


def try_again(
    tx: Transaction, task: int, sample: int, reason: str, *, keep_progress: bool, counts: bool = True
) -> bool:
    """Puts a sample back into the queue, or drops it when it has been tried `max_attempts` times.

    Args:
        counts: whether this is one of its attempts; after a rollback it is not.

    Returns:
        Whether it will be tried again. The group has to be settled afterwards.
    """
    (attempt,) = tx.db.execute("SELECT attempt FROM samples WHERE task = ? AND sample = ?", (task, sample)).fetchone()
    if counts and attempt >= tx.settings.max_attempts:
        drop_sample(tx, task, sample, reason)
        return False
    tx.db.execute(
        "UPDATE samples SET state = 'waiting', attempt = attempt + ?, reward = NULL, oldest_version = NULL,"
        " newest_version = NULL WHERE task = ? AND sample = ?",
        (int(counts), task, sample),
    )
    progress_only = " AND finished" if keep_progress else ""
    tx.db.execute(f"DELETE FROM payloads WHERE task = ? AND sample = ?{progress_only}", (task, sample))
    tx.count("reissued", reason)
    return True


def drop_sample(tx: Transaction, task: int, sample: int, reason: str) -> None:
    """Gives a sample up for good."""
    tx.db.execute("UPDATE samples SET state = ? WHERE task = ? AND sample = ?", (f"dropped:{reason}", task, sample))
    tx.db.execute("DELETE FROM payloads WHERE task = ? AND sample = ?", (task, sample))


def settle(tx: Transaction, task: int) -> None:
    """Gives a group that no learner holds the state that its samples imply."""
    rows = tx.db.execute("SELECT state, reward FROM samples WHERE task = ?", (task,)).fetchall()
    states = {row["state"] for row in rows}
    if "running" in states:
        return
    if "waiting" in states:
        _back_to_queue(tx, task)
        return
    rewards = [row["reward"] for row in rows if row["state"] in ("arrived", "ready")]
    if len(rewards) < tx.settings.min_members:
        _drop_group(tx, task, "too_few")
    elif tx.settings.drop_uniform_groups and len(rows) > 1 and statistics.pstdev(rewards) < UNIFORM_STD:
        _drop_group(tx, task, "uniform")
    else:
        _make_ready(tx, task)


def _back_to_queue(tx: Transaction, task: int) -> None:
    tx.db.execute("UPDATE samples SET state = 'arrived' WHERE task = ? AND state = 'ready'", (task,))
    tx.db.execute(
        "UPDATE groups SET state = 'waiting', worker = NULL, leased_at = NULL, lease_until = NULL, ready_order = NULL,"
        " batch = NULL, trained_step = NULL, trained_version = NULL WHERE task = ?",
        (task,),
    )


def _make_ready(tx: Transaction, task: int) -> None:
    tx.db.execute("UPDATE samples SET state = 'ready' WHERE task = ? AND state = 'arrived'", (task,))
    tx.db.execute(
        "UPDATE groups SET state = 'ready', worker = NULL, leased_at = NULL, lease_until = NULL,"
        " ready_order = coalesce(ready_order, ?), trained_step = NULL, trained_version = NULL WHERE task = ?",
        (tx.advance("ready_clock"), task),
    )


def _drop_group(tx: Transaction, task: int, reason: str) -> None:
    """Drops what is left of a group; admission then has room for a new task in its place."""
    for row in tx.db.execute(
        "SELECT sample FROM samples WHERE task = ? AND state IN ('arrived', 'ready')", (task,)
    ).fetchall():
        drop_sample(tx, task, row["sample"], reason)
    tx.db.execute(
        "UPDATE groups SET state = 'dropped', worker = NULL, leased_at = NULL, lease_until = NULL, batch = NULL"
        " WHERE task = ?",
        (task,),
    )
    tx.count("dropped_groups", reason)
