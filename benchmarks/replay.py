"""Puts and leases of the replay store against bare SQLite that writes the same bytes in the same kind of transaction.

The limit is what durability costs at least: `BEGIN IMMEDIATE`, one INSERT of each payload, `COMMIT`, with the store's own
journal settings. The store adds the account: states, leases, counters, attempts. Both take turns on files side by side; seconds
are the processor's (user and system), which is what both cost: neither waits for the disk at a commit.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.replay import Entry, ReplayStore
from actors.replay.database import connect
from actors.replay.records import ReplaySettings
from toolrl.trajectory import Outcome, Trajectory, Turn

GROUPS, GROUP = 48, 8
BATCH_GROUPS = 16
ROUNDS = 5
TURN_TOKENS = {"short (5 turns of 20 tokens)": 20, "long (5 turns of 800 tokens)": 800}


def run() -> dict[str, Any]:
    """`rows`: samples/s of an operation and of the limit, and their ratio, the median over rounds."""
    before = os.getloadavg()[0]
    rows = [row for name, tokens in TURN_TOKENS.items() for row in _rows(name, tokens)]
    return {"load before": before, "load after": os.getloadavg()[0], "rows": rows}


def _rows(name: str, tokens: int) -> list[dict[str, Any]]:
    entries = [Entry.of(_trajectory(group, member, tokens)) for group in range(GROUPS) for member in range(GROUP)]
    rounds = [_round(entries) for _ in range(ROUNDS)]
    kib = statistics.fmean(len(entry.payload) for entry in entries) / 1024
    return [
        {
            "trajectories": f"{name}, {kib:.1f} KiB",
            "operation": operation,
            "samples/s": statistics.median(len(entries) / each[operation][0] for each in rounds),
            "limit samples/s": statistics.median(len(entries) / each[operation][1] for each in rounds),
            "share of the limit": statistics.median(each[operation][1] / each[operation][0] for each in rounds),
        }
        for operation in rounds[0]
    ]


def _round(entries: Sequence[Entry]) -> dict[str, tuple[float, float]]:
    """Operation -> seconds for all entries, by the store and by its limit."""
    with tempfile.TemporaryDirectory() as folder:
        one = _insert(Path(folder) / "one.sqlite", entries, 1)
        many = _insert(Path(folder) / "many.sqlite", entries, GROUP)
        read = _read(Path(folder) / "one.sqlite", len(entries))
        alone, tickets, batches = _store(Path(folder) / "a.sqlite", entries, 1)
        together, _, _ = _store(Path(folder) / "b.sqlite", entries, GROUP)
        bare = _insert(Path(folder) / "bare.sqlite", [replace(entry, payload=b"") for entry in entries], GROUP)
    return {
        "put, 1 a transaction": (alone, one),
        f"put, {GROUP} a transaction": (together, many),
        f"lease tickets of {GROUP} (limit: insert {GROUP} empty rows)": (tickets, bare),
        f"lease and acknowledge {BATCH_GROUPS * GROUP} (limit: read them)": (batches, read),
    }


def _store(path: Path, entries: Sequence[Entry], at_once: int) -> tuple[float, float, float]:
    """Seconds for all puts, all tickets, all batches."""
    settings = ReplaySettings(GROUP, BATCH_GROUPS, max_staleness=GROUPS // BATCH_GROUPS - 1, drop_uniform_groups=False)
    store = ReplayStore(path, settings)
    started = time.process_time()
    for _ in range(GROUPS):
        if store.lease_ticket("worker", engine_version=0) is None:
            raise RuntimeError(f"no ticket: {store.waiting_for()}")
    leased = time.process_time()
    for first in range(0, len(entries), at_once):
        statuses = store.put("worker", entries[first : first + at_once])
        if set(statuses) != {"accepted"}:
            raise RuntimeError(f"puts ended as {statuses}")
    put = time.process_time()
    for step in range(1, GROUPS // BATCH_GROUPS + 1):
        batch = store.lease_batch("learner", BATCH_GROUPS, 0)
        if batch is None:
            raise RuntimeError(f"no batch: {store.waiting_for()}")
        store.ack(batch.batch_id, step, step)
    done = time.process_time()
    store.close()
    return put - leased, leased - started, done - put


def _insert(path: Path, entries: Sequence[Entry], at_once: int) -> float:
    """Seconds to write the payloads, `at_once` a transaction."""
    db = connect(path)
    db.execute("CREATE TABLE payloads (task INTEGER, sample INTEGER, data BLOB, PRIMARY KEY (task, sample))")
    started = time.process_time()
    for first in range(0, len(entries), at_once):
        db.execute("BEGIN IMMEDIATE")
        for number, entry in enumerate(entries[first : first + at_once], first):
            db.execute("INSERT INTO payloads VALUES (?, ?, ?)", (number // GROUP, number % GROUP, entry.payload))
        db.execute("COMMIT")
    seconds = time.process_time() - started
    db.close()
    return seconds


def _read(path: Path, count: int) -> float:
    """Seconds to read all payloads back, a batch's worth a query."""
    db: sqlite3.Connection = connect(path)
    started = time.process_time()
    found = 0
    for first in range(0, GROUPS, BATCH_GROUPS):
        query = "SELECT data FROM payloads WHERE task >= ? AND task < ?"
        found += len(db.execute(query, (first, first + BATCH_GROUPS)).fetchall())
    seconds = time.process_time() - started
    db.close()
    if found != count:
        raise RuntimeError(f"read {found} payloads of {count}")
    return seconds


def _trajectory(group: int, member: int, tokens: int) -> Trajectory:
    def said(turn: int) -> Turn:
        ids = [(7 * k + 13 * turn + member) % 500 for k in range(tokens)]
        return Turn("policy", ids, [-0.1 * (k % 37) for k in ids], [0] * tokens, "stop", text="x" * 3 * tokens)

    return Trajectory(
        id=f"g{group:06d}.{member}",
        group_id=f"g{group:06d}",
        task_id=f"task-{group}",
        sample_index=member,
        prompt_ids=list(range(60)),
        turns=[said(turn) for turn in range(5)],
        outcome=Outcome.ANSWERED,
        rewards={"outcome": float(member % 2)},
    )
