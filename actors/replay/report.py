"""What the buffer says about itself: the ledger, depths, whom a late batch waits for. Reads only."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from actors.replay import tickets
from actors.replay.database import Transaction, connect
from actors.replay.records import group_name
from toolrl.ledger import Ledger
from toolrl.trajectory import Trajectory
from toolrl.trajectory_codec import decode

_SHOWN_GROUPS = 8


def ledger(db: sqlite3.Connection) -> Ledger:
    """The account, from one consistent view of the file."""
    (issued,) = db.execute("SELECT value FROM meta WHERE name = 'issued'").fetchone()
    counts = {row["state"]: row["n"] for row in db.execute("SELECT * FROM sample_counts WHERE n <> 0")}
    counters: dict[str, dict[str, int]] = {"reissued": {}, "outcomes": {}, "puts": {}}
    for row in db.execute("SELECT * FROM counters WHERE kind IN ('reissued', 'outcomes', 'puts')"):
        counters[row["kind"]][row["name"]] = row["n"]
    return Ledger(
        issued=issued,
        dropped={state.partition(":")[2]: n for state, n in counts.items() if state.startswith("dropped:")},
        trained=counts.get("trained", 0),
        ready=counts.get("ready", 0),
        leased=counts.get("leased", 0),
        waiting=counts.get("waiting", 0),
        running=counts.get("running", 0),
        arrived=counts.get("arrived", 0),
        **counters,
    )


def read_ledger(path: str | Path) -> Ledger:
    """The account of a buffer's file, also while the buffer is at work."""
    with _reading(path) as db:
        return ledger(db)


def read_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """Every finished trajectory whose payload is still kept, by task and sample."""
    with _reading(path) as db:
        for row in db.execute("SELECT data FROM payloads WHERE finished ORDER BY task, sample"):
            yield decode(row["data"])


class _reading:
    """One read transaction on a connection of its own."""

    def __init__(self, path: str | Path) -> None:
        self._db = connect(Path(path), read_only=True)

    def __enter__(self) -> sqlite3.Connection:
        self._db.execute("BEGIN")
        return self._db

    def __exit__(self, *_: object) -> None:
        self._db.close()


def audit(db: sqlite3.Connection) -> list[str]:
    """Compares everything that is written down twice. Returns what does not agree; empty when the account is sound."""
    wrong = []
    account = ledger(db)
    if not account.balances:
        wrong.append(f"issued is not the sum of the states: {account.as_dict()}")
    rows = {row["state"]: row["n"] for row in db.execute("SELECT state, count(*) AS n FROM samples GROUP BY state")}
    kept = {row["state"]: row["n"] for row in db.execute("SELECT state, n FROM sample_counts WHERE n <> 0")}
    if rows != kept:
        wrong.append(f"samples by state are {rows}, counted were {kept}")
    settled = {"ready": "ready", "leased": "leased", "trained": "trained"}
    for row in db.execute("SELECT g.task, g.state, s.state AS sample FROM groups g JOIN samples s ON s.task = g.task"):
        if row["sample"].startswith("dropped"):
            continue
        allowed = {
            "waiting": ("waiting", "arrived"),
            "generating": ("waiting", "running", "arrived"),
            "dropped": (),
        }.get(row["state"]) or (settled.get(row["state"], ""),)
        if row["sample"] not in allowed:
            wrong.append(f"{group_name(row['task'])} is {row['state']} but one of its samples is {row['sample']}")
    lost = db.execute(
        "SELECT count(*) FROM samples s LEFT JOIN payloads p ON p.task = s.task AND p.sample = s.sample AND p.finished"
        " WHERE s.state IN ('arrived', 'ready', 'leased') AND p.data IS NULL"
    ).fetchone()[0]
    if lost:
        wrong.append(f"{lost} finished samples have no payload")
    return wrong


def stats(tx: Transaction) -> dict[str, float]:
    """Queue depths and sizes, by name."""
    groups = {row["state"]: row["n"] for row in tx.db.execute("SELECT state, count(*) AS n FROM groups GROUP BY state")}
    names = ("waiting", "generating", "ready", "leased", "trained", "dropped")
    (payload_bytes,) = tx.db.execute(
        "SELECT (SELECT page_count FROM pragma_page_count) * (SELECT page_size FROM pragma_page_size)"
    ).fetchone()
    return {
        **{f"groups_{name}": groups.get(name, 0) for name in names},
        "groups_outstanding": tickets.outstanding(tx),
        "groups_admissible": tickets.admissible(tx),
        "next_task": tx.meta("next_task"),
        "version": tx.meta("version"),
        "file_bytes": payload_bytes,
    }


def trained_task_indices(db: sqlite3.Connection) -> list[int]:
    """Task indices in the order in which they were trained."""
    rows = db.execute("SELECT task FROM groups WHERE state = 'trained' ORDER BY trained_step, task")
    return [row["task"] for row in rows]


def waiting_for(tx: Transaction) -> str:
    """For people: which groups are missing, who works on them and for how long."""
    depths = stats(tx)
    lines = [
        f"{depths['groups_ready']:.0f} groups ready, {tx.settings.batch_groups} wanted;"
        f" {depths['groups_generating']:.0f} at workers, {depths['groups_waiting']:.0f} waiting for a worker,"
        f" {depths['groups_admissible']:.0f} more may be issued"
    ]
    rows = tx.db.execute(
        "SELECT g.task, g.state, g.worker, g.size, g.leased_at, w.seen_at"
        " FROM groups g LEFT JOIN workers w ON w.worker = g.worker"
        " WHERE g.state IN ('waiting', 'generating') ORDER BY coalesce(g.leased_at, 0), g.task LIMIT ?",
        (_SHOWN_GROUPS,),
    ).fetchall()
    for row in rows:
        missing = tx.db.execute(
            "SELECT sample FROM samples WHERE task = ? AND state IN ('waiting', 'running') ORDER BY sample",
            (row["task"],),
        ).fetchall()
        who = "no worker has it"
        if row["worker"] is not None:
            held, silent = tx.now - row["leased_at"], tx.now - row["seen_at"]
            who = f"at worker {row['worker']} for {held:.0f} s, heard from {silent:.0f} s ago"
        samples = ", ".join(str(sample["sample"]) for sample in missing)
        lines.append(f"{group_name(row['task'])}: {len(missing)} of {row['size']} samples missing ({samples}); {who}")
    more = depths["groups_generating"] + depths["groups_waiting"] - len(rows)
    if more > 0:
        lines.append(f"and {more:.0f} more groups")
    dropped = tx.counters("dropped_groups")
    if dropped:
        lines.append("groups dropped so far: " + ", ".join(f"{reason} {n}" for reason, n in sorted(dropped.items())))
    return "\n".join(lines)
