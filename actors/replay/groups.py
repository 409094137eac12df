"""How a sample and its group change state. Every rule about when a group is complete, ready or dropped is here.

    waiting ──lease──▶ running ──put──▶ arrived ──group complete──▶ ready ──lease──▶ leased ──ack──▶ trained
       ▲                  │                                           │                │
       └──── re-issue ────┴──────────────── too old ──────────────────┘◀─ nack, expiry ┘
    and from any of them but trained: dropped:REASON; between running and arrived, a sample whose rewards come later is
    `unrewarded` (see `rewards`)

Invariants: a group is `generating` exactly when one of its samples is `running`; `waiting` when none is running and one
is waiting; `unrewarded` when neither is and one is unrewarded; otherwise it is settled: `ready`, `leased`, `trained` or
`dropped`.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.replay.database import Transaction
from toolrl.reward_records import has_spread
from toolrl.rewards.group_rewards import GroupRewardFailed
from toolrl.trajectory_codec import decode

_SINCE_BATCH = "dropped_since_batch"
UNIFORM, TOO_FEW = "uniform", "too_few"  # reasons


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
    tx.db.execute("DELETE FROM awaited_rewards WHERE task = ? AND sample = ?", (task, sample))
    tx.count("reissued", reason)
    return True


def drop_sample(tx: Transaction, task: int, sample: int, reason: str) -> None:
    """Gives a sample up for good."""
    tx.db.execute("UPDATE samples SET state = ? WHERE task = ? AND sample = ?", (f"dropped:{reason}", task, sample))
    tx.db.execute("DELETE FROM payloads WHERE task = ? AND sample = ?", (task, sample))
    tx.db.execute(
        "UPDATE awaited_rewards SET state = 'closed' WHERE task = ? AND sample = ? AND state = 'awaited'",
        (task, sample),
    )


def settle(tx: Transaction, task: int) -> None:
    """Gives a group that no learner holds the state that its samples imply."""
    rows = tx.db.execute("SELECT state, reward FROM samples WHERE task = ?", (task,)).fetchall()
    states = {row["state"] for row in rows}
    if "running" in states:
        return
    if "waiting" in states:
        _out_of_batches(tx, task, "waiting")
        return
    if "unrewarded" in states:
        _out_of_batches(tx, task, "unrewarded")
        return
    rewards = [row["reward"] for row in rows if row["state"] in ("arrived", "ready")]
    if len(rewards) < tx.settings.min_members:
        drop_group(tx, task, TOO_FEW)
        if "dropped:reward_missing" in states:
            tx.count(_SINCE_BATCH, TOO_FEW)
    elif tx.settings.drop_uniform_groups and len(rows) > 1 and not _teaches(tx, task, rewards):
        drop_group(tx, task, UNIFORM)
        tx.count(_SINCE_BATCH, UNIFORM)
    else:
        _make_ready(tx, task)


def _teaches(tx: Transaction, task: int, rewards: Sequence[float]) -> bool:
    """Whether the members' rewards differ, or will when those are given that compare them (they are, to every batch), or those
    of single turns do where each turn is taught by its own."""
    settings = tx.settings
    if has_spread(rewards) or not (settings.group_rewards or settings.turn_credit):
        return has_spread(rewards)
    rows = tx.db.execute(
        "SELECT p.data FROM payloads p JOIN samples s ON s.task = p.task AND s.sample = p.sample"
        " WHERE p.task = ? AND s.state IN ('arrived', 'ready') ORDER BY p.sample",
        (task,),
    ).fetchall()
    members = [decode(row["data"]) for row in rows]
    if settings.turn_credit and has_spread([reward for member in members for reward in member.turn_rewards]):
        return True
    try:
        return settings.group_rewards is not None and settings.group_rewards.has_signal(members)
    except GroupRewardFailed:
        return True  # the batch that holds it says so, where it can be read


def _out_of_batches(tx: Transaction, task: int, state: str) -> None:
    """No worker and no learner has the group; it is to be generated (`waiting`) or rewarded (`unrewarded`)."""
    tx.db.execute("UPDATE samples SET state = 'arrived' WHERE task = ? AND state = 'ready'", (task,))
    tx.db.execute(
        "UPDATE groups SET state = ?, worker = NULL, leased_at = NULL, lease_until = NULL, ready_order = NULL,"
        " batch = NULL, trained_step = NULL, trained_version = NULL WHERE task = ?",
        (state, task),
    )


def _make_ready(tx: Transaction, task: int) -> None:
    tx.db.execute("UPDATE samples SET state = 'ready' WHERE task = ? AND state = 'arrived'", (task,))
    tx.db.execute(
        "UPDATE groups SET state = 'ready', worker = NULL, leased_at = NULL, lease_until = NULL,"
        " ready_order = coalesce(ready_order, ?), trained_step = NULL, trained_version = NULL WHERE task = ?",
        (tx.advance("ready_clock"), task),
    )


def drop_group(tx: Transaction, task: int, reason: str) -> None:
    """Drops what is left of a group; admission then has room for a new task in its place."""
    for row in tx.db.execute(
        "SELECT sample FROM samples WHERE task = ? AND state IN ('arrived', 'ready', 'leased')", (task,)
    ).fetchall():
        drop_sample(tx, task, row["sample"], reason)
    tx.db.execute(
        "UPDATE groups SET state = 'dropped', worker = NULL, leased_at = NULL, lease_until = NULL, batch = NULL"
        " WHERE task = ?",
        (task,),
    )
    tx.count("dropped_groups", reason)


def fruitless_since_batch(tx: Transaction) -> dict[str, int]:
    """Groups dropped since the last batch was leased because their tasks taught nothing, by reason: the rewards had no
    spread (`uniform`), or too few samples could get one (`too_few`; those lost to a fault of the machinery do not count)."""
    return tx.counters(_SINCE_BATCH)


def begin_count_anew(tx: Transaction) -> None:
    """A batch came together, or the account went back: what was dropped before is no sign any more."""
    tx.db.execute("DELETE FROM counters WHERE kind = ?", (_SINCE_BATCH,))
