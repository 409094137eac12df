"""The worker's side: issuing tickets, leasing them, taking in what was generated, taking back what the dead held.

Invariants:
- A task index is issued once; the cursor moves in the transaction that makes the group.
- Groups that are begun and not yet trained never exceed (max_staleness + 1) × batch_groups, and none is issued beyond
  that. A trained group counts until the version that it made is published: that makes staleness 0 strictly synchronous.
- A group that is dropped makes room for a new task, so batches stay full; after `max_fruitless_groups` dropped for want of
  spread since the last batch none is issued, so tasks that teach nothing do not cost for ever.
- What is delivered counts once, whoever holds the lease by then: finished work is kept, the second copy is ignored and
  counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.replay import rewards
from actors.replay.database import Transaction
from actors.replay.groups import drop_sample, fruitless_since_batch, settle, try_again
from actors.replay.records import Entry, PutStatus, Ticket, group_name, sample_seed, task_index_of
from toolrl.trajectory import Outcome
from toolrl.trajectory_codec import decode


def outstanding(tx: Transaction) -> int:
    """Groups that the admission bound counts."""
    (n,) = tx.db.execute(
        "SELECT (SELECT count(*) FROM groups WHERE state IN ('waiting', 'generating', 'unrewarded', 'ready', 'leased'))"
        " + (SELECT count(*) FROM groups WHERE trained_version > ?)",
        (tx.meta("version"),),
    ).fetchone()
    return int(n)


# A waiting group of which a part has arrived.
_BEGUN = (
    "EXISTS (SELECT 1 FROM samples WHERE samples.task = groups.task AND samples.state IN ('unrewarded', 'arrived'))"
)


def _may_begin(tx: Transaction) -> bool:
    """Whether a group that waits untouched may be begun. It always may, unless a rollback has left more groups than the
    bound: then those that are trained last have to wait, or they would be stale by then."""
    (untouched,) = tx.db.execute(f"SELECT count(*) FROM groups WHERE state = 'waiting' AND NOT {_BEGUN}").fetchone()
    return outstanding(tx) - int(untouched) < tx.settings.max_outstanding_groups


def admissible(tx: Transaction) -> int:
    """How many groups may be issued now, by the staleness bound, the length of the run, and the bound on refills."""
    if sum(fruitless_since_batch(tx).values()) >= tx.settings.max_fruitless_groups:
        return 0
    room = tx.settings.max_outstanding_groups - outstanding(tx)
    if tx.settings.total_groups is not None:
        useful = tx.meta("next_task") - tx.meta("first_task") - sum(tx.counters("dropped_groups").values())
        room = min(room, tx.settings.total_groups - useful)
    return max(0, room)


def issue(tx: Transaction, n: int) -> list[int]:
    """Makes n groups with the next n task indices, admissible or not. Returns the indices."""
    size, version = tx.settings.group_size, tx.meta("version")
    first = tx.advance("next_task", n)
    tasks = list(range(first, first + n))
    tx.db.executemany(
        "INSERT INTO groups (task, state, size, min_version) VALUES (?, 'waiting', ?, ?)",
        [(task, size, version) for task in tasks],
    )
    tx.db.executemany(
        "INSERT INTO samples (task, sample, state) VALUES (?, ?, 'waiting')",
        [(task, sample) for task in tasks for sample in range(size)],
    )
    tx.advance("issued", n * size)
    return tasks


def lease(tx: Transaction, worker: str, engine_version: int | None) -> Ticket | None:
    """The oldest waiting group, else a new one if one is admissible, else None; None too while admission is closed.

    Args:
        engine_version: the weights that the worker's engine serves. A group that such weights would make stale is left
            to others. None: the worker sees to it that it serves `ticket.version` or newer.
    """
    see(tx, worker, unfence=True)
    if tx.meta("closed"):
        return None
    version = tx.meta("version")
    floor = version - tx.settings.max_staleness
    serves = version if engine_version is None else engine_version
    row = tx.db.execute(
        f"SELECT task, min_version FROM groups WHERE state = 'waiting' AND max(min_version, ?) <= ? AND (? OR {_BEGUN})"
        " ORDER BY task LIMIT 1",
        (floor, serves, _may_begin(tx)),
    ).fetchone()
    if row is not None:
        task, needed = int(row["task"]), max(int(row["min_version"]), floor)
    elif serves >= version and admissible(tx) > 0:
        (task,), needed = issue(tx, 1), version
    else:
        return None
    _discard_old_progress(tx, task, floor)
    tx.db.execute(
        "UPDATE groups SET state = 'generating', worker = ?, leased_at = ?, lease_until = ?, min_version = min(?,"
        " coalesce((SELECT min(oldest_version) FROM payloads WHERE task = groups.task AND NOT finished), ?))"
        " WHERE task = ?",
        (worker, tx.now, _lease_end(tx, tx.now), *[needed if engine_version is None else serves] * 2, task),
    )
    tx.db.execute("UPDATE samples SET state = 'running' WHERE task = ? AND state = 'waiting'", (task,))
    return _ticket(tx, task, needed)


def _ticket(tx: Transaction, task: int, version: int) -> Ticket:
    (size,) = tx.db.execute("SELECT size FROM groups WHERE task = ?", (task,)).fetchone()
    running = tx.db.execute(
        "SELECT sample, attempt FROM samples WHERE task = ? AND state = 'running' ORDER BY sample", (task,)
    ).fetchall()
    progress = tx.db.execute("SELECT sample, data FROM payloads WHERE task = ? AND NOT finished", (task,)).fetchall()
    return Ticket(
        group_id=group_name(task),
        task_index=task,
        group_size=size,
        samples_missing=[row["sample"] for row in running],
        attempts={row["sample"]: row["attempt"] for row in running},
        seeds={row["sample"]: sample_seed(tx.settings.seed, task, row["sample"]) for row in running},
        version=version,
        progress={row["sample"]: decode(row["data"]) for row in progress},
    )


def _discard_old_progress(tx: Transaction, task: int, floor: int) -> None:
    """An unfinished episode whose first tokens are beyond the bound already would only be thrown away later."""
    done = tx.db.execute("DELETE FROM payloads WHERE task = ? AND NOT finished AND oldest_version < ?", (task, floor))
    if done.rowcount:
        tx.count("puts", "progress_too_old", done.rowcount)


def _lease_end(tx: Transaction, leased_at: float) -> float:
    end = tx.now + tx.settings.worker_lease_s
    deadline = tx.settings.ticket_deadline_s
    return end if deadline is None else min(end, leased_at + deadline)


def see(tx: Transaction, worker: str, *, unfence: bool = False) -> None:
    """Notes that a worker is alive; one that asks for work after a rollback may deliver again."""
    tx.db.execute(
        "INSERT INTO workers VALUES (?, ?, 0) ON CONFLICT (worker) DO UPDATE SET seen_at = excluded.seen_at,"
        " fenced = fenced AND ?",
        (worker, tx.now, int(not unfence)),
    )


def heartbeat(tx: Transaction, worker: str, group_ids: Sequence[str] | None) -> list[str]:
    """Prolongs the leases of the groups that the worker says it works on (None: all of its own).

    Returns:
        The ids among them that are no longer its own: it should stop working on them.
    """
    see(tx, worker)
    held = tx.db.execute(
        "SELECT task, leased_at FROM groups WHERE state = 'generating' AND worker = ?", (worker,)
    ).fetchall()
    named = None if group_ids is None else {task_index_of(group_id) for group_id in group_ids}
    for row in held:
        if named is None or row["task"] in named:
            tx.db.execute(
                "UPDATE groups SET lease_until = ? WHERE task = ?", (_lease_end(tx, row["leased_at"]), row["task"])
            )
    lost = (named or set()) - {row["task"] for row in held}
    return [group_name(task) for task in sorted(lost)]


def put(tx: Transaction, worker: str, entries: Sequence[Entry]) -> list[PutStatus]:
    """Takes in finished trajectories; the status of each says what became of it."""
    see(tx, worker)
    (fenced,) = tx.db.execute("SELECT fenced FROM workers WHERE worker = ?", (worker,)).fetchone()
    statuses: list[PutStatus] = ["fenced" if fenced else _put_one(tx, worker, entry) for entry in entries]
    for status in statuses:
        tx.count("puts", status)
    if not fenced:
        for task in {task_index_of(entry.group_id) for entry in entries}:
            (state,) = tx.db.execute("SELECT state FROM groups WHERE task = ?", (task,)).fetchone()
            if state in ("waiting", "generating"):
                settle(tx, task)
    return statuses


def _put_one(tx: Transaction, worker: str, entry: Entry) -> PutStatus:
    if entry.outcome is None:
        raise ValueError(f"{entry.group_id} sample {entry.sample_index}: unfinished; use put_progress")
    task, state, holder = _find(tx, entry)
    if state not in ("waiting", "running"):
        return "closed" if state.startswith("dropped") else "duplicate"
    if not entry.outcome.trained and holder != worker:
        return "duplicate"  # a failure of somebody whose lease is over says nothing about the try that replaced it
    unrewarded = entry.outcome.trained and rewards.begin(tx, task, entry)
    if not unrewarded:
        tx.count("outcomes", entry.outcome.value)
    if entry.outcome.reissued:
        keep = entry.outcome is Outcome.INFRA_ERROR
        again = try_again(tx, task, entry.sample_index, entry.outcome.value, keep_progress=keep)
        return "reissued" if again else "dropped"
    if not entry.outcome.trained:
        drop_sample(tx, task, entry.sample_index, entry.outcome.value)
        return "dropped"
    tx.db.execute(
        "UPDATE samples SET state = ?, reward = ?, oldest_version = ?, newest_version = ?"
        " WHERE task = ? AND sample = ?",
        (
            "unrewarded" if unrewarded else "arrived",
            entry.reward,
            entry.oldest_version,
            entry.newest_version,
            task,
            entry.sample_index,
        ),
    )
    _keep(tx, task, entry, finished=True)
    return "accepted"


def put_progress(tx: Transaction, worker: str, entries: Sequence[Entry]) -> int:
    """Stores unfinished episodes up to their last turn boundary. Returns how many were of use."""
    see(tx, worker)
    (fenced,) = tx.db.execute("SELECT fenced FROM workers WHERE worker = ?", (worker,)).fetchone()
    kept = 0
    for entry in entries:
        if entry.outcome is not None:
            raise ValueError(f"{entry.group_id} sample {entry.sample_index}: it ended ({entry.outcome}); use put")
        task, state, holder = _find(tx, entry)
        if state in ("waiting", "running") and holder in (worker, None) and not fenced:
            _keep(tx, task, entry, finished=False)
            kept += 1
    return kept


def _keep(tx: Transaction, task: int, entry: Entry, *, finished: bool) -> None:
    tx.db.execute(
        "INSERT OR REPLACE INTO payloads VALUES (?, ?, ?, ?, ?, ?)",
        (task, entry.sample_index, int(finished), entry.payload, entry.oldest_version, entry.newest_version),
    )


def _find(tx: Transaction, entry: Entry) -> tuple[int, str, str | None]:
    """Task index, state of the sample, and the worker that holds its group."""
    task = task_index_of(entry.group_id)
    row = tx.db.execute(
        "SELECT s.state, g.worker FROM samples s JOIN groups g ON g.task = s.task WHERE s.task = ? AND s.sample = ?",
        (task, entry.sample_index),
    ).fetchone()
    if row is None:
        raise ValueError(
            f"{entry.group_id} sample {entry.sample_index} was never issued by this buffer; "
            "use the group_id and a sample index of the ticket"
        )
    return task, row["state"], row["worker"]


def give_back(tx: Transaction, task: int, reason: str | None) -> None:
    """Puts a generating group back into the queue; what has arrived stays.

    Args:
        reason: why its missing samples count as tried, or None when the worker gave them back in order.
    """
    running = tx.db.execute("SELECT sample FROM samples WHERE task = ? AND state = 'running'", (task,)).fetchall()
    for row in running:
        if reason is None:
            tx.db.execute("UPDATE samples SET state = 'waiting' WHERE task = ? AND sample = ?", (task, row["sample"]))
        else:
            try_again(tx, task, row["sample"], reason, keep_progress=True)
    settle(tx, task)


def expire(tx: Transaction) -> list[str]:
    """Takes back the tickets of workers that are silent or over the deadline. Returns their group ids."""
    late = tx.db.execute(
        "SELECT task, leased_at FROM groups WHERE state = 'generating' AND lease_until < ?", (tx.now,)
    ).fetchall()
    deadline = tx.settings.ticket_deadline_s
    for row in late:
        over = deadline is not None and tx.now > row["leased_at"] + deadline
        give_back(tx, row["task"], "deadline" if over else "worker_lost")
    return [group_name(row["task"]) for row in late]
