"""The file: tables, how it is opened, and one transaction's view of it.

WAL with synchronous=NORMAL: a commit survives the process (SIGKILL included) because the pages are with the kernel by
then; after a power loss the last commits may be missing, but the file is whole and the account still balances.

`sample_counts` is kept by triggers, so no change of a sample's state can forget to count; `audit` compares it with the
rows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from actors.replay.records import ReplaySettings

FORMAT = 2

# groups.state: waiting, generating, unrewarded, ready, leased, trained, dropped.
# samples.state: waiting, running, unrewarded, arrived, ready, leased, trained, dropped:REASON.
# awaited_rewards.state: awaited, delivered, closed.
SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    task INTEGER PRIMARY KEY,
    state TEXT NOT NULL,
    size INTEGER NOT NULL,
    min_version INTEGER NOT NULL,
    worker TEXT, leased_at REAL, lease_until REAL,
    ready_order INTEGER,
    batch INTEGER,
    trained_step INTEGER, trained_version INTEGER
);
CREATE INDEX groups_by_state ON groups (state);
CREATE INDEX groups_by_batch ON groups (batch) WHERE batch IS NOT NULL;
CREATE INDEX groups_by_trained_step ON groups (trained_step) WHERE trained_step IS NOT NULL;
CREATE INDEX groups_by_trained_version ON groups (trained_version) WHERE trained_version IS NOT NULL;
CREATE TABLE samples (
    task INTEGER NOT NULL, sample INTEGER NOT NULL,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 1,
    reward REAL, oldest_version INTEGER, newest_version INTEGER,
    PRIMARY KEY (task, sample)
) WITHOUT ROWID;
CREATE TABLE payloads (
    task INTEGER NOT NULL, sample INTEGER NOT NULL, finished INTEGER NOT NULL, data BLOB NOT NULL,
    oldest_version INTEGER, newest_version INTEGER,
    PRIMARY KEY (task, sample)
);
CREATE TABLE awaited_rewards (
    trajectory TEXT NOT NULL, name TEXT NOT NULL,
    task INTEGER NOT NULL, sample INTEGER NOT NULL,
    state TEXT NOT NULL, until REAL NOT NULL, claimed_until REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (trajectory, name)
) WITHOUT ROWID;
CREATE INDEX awaited_rewards_by_sample ON awaited_rewards (task, sample);
CREATE INDEX awaited_rewards_by_state ON awaited_rewards (state, until);
CREATE TABLE batches (
    batch INTEGER PRIMARY KEY AUTOINCREMENT,
    learner TEXT NOT NULL, request TEXT, state TEXT NOT NULL, leased_at REAL NOT NULL, lease_until REAL NOT NULL,
    groups INTEGER NOT NULL, step INTEGER
);
CREATE TABLE workers (
    worker TEXT PRIMARY KEY, seen_at REAL NOT NULL, fenced INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE counters (
    kind TEXT NOT NULL, name TEXT NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (kind, name)
) WITHOUT ROWID;
CREATE TABLE sample_counts (state TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER sample_born AFTER INSERT ON samples BEGIN
    INSERT INTO sample_counts VALUES (NEW.state, 1) ON CONFLICT (state) DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER sample_moved AFTER UPDATE OF state ON samples WHEN OLD.state <> NEW.state BEGIN
    UPDATE sample_counts SET n = n - 1 WHERE state = OLD.state;
    INSERT INTO sample_counts VALUES (NEW.state, 1) ON CONFLICT (state) DO UPDATE SET n = n + 1;
END;
"""


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Opens the file, making it when it is not there.

    Raises:
        ValueError: a file of another format.
        FileNotFoundError: `read_only` and there is none.
    """
    if read_only and not path.exists():
        raise FileNotFoundError(f"no replay buffer at {path}; a run writes one in its folder when it starts")
    address = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    db = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False, timeout=30.0)
    db.row_factory = sqlite3.Row
    if not read_only:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
    db.execute("PRAGMA cache_size=-65536")
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found not in (0, FORMAT):
        db.close()
        raise ValueError(
            f"{path} is a replay buffer of format {found}; this code reads format {FORMAT}: start a new run"
        )
    return db


def create(db: sqlite3.Connection, settings: ReplaySettings) -> None:
    """Makes the tables unless they exist; all or nothing, so that a kill in the middle leaves an empty file."""
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found == FORMAT:
        db.execute("INSERT OR IGNORE INTO meta VALUES ('closed', 0)")  # files from before there was one
        return
    first = settings.first_task_index
    rows = "".join(
        f"INSERT INTO meta VALUES ('{name}', {value});"
        for name, value in (
            ("first_task", first),
            ("next_task", first),
            ("version", 0),
            ("issued", 0),
            ("ready_clock", 0),
            ("pruned_to_step", -1),
            ("closed", 0),
        )
    )
    db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} {rows} PRAGMA user_version={FORMAT}; COMMIT;")


@dataclass(slots=True)
class Transaction:
    """One transaction: the connection, the settings and the time at which it happens."""

    db: sqlite3.Connection
    settings: ReplaySettings
    now: float

    def meta(self, name: str) -> int:
        row = self.db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return int(row[0])

    def set_meta(self, name: str, value: int) -> None:
        self.db.execute("UPDATE meta SET value = ? WHERE name = ?", (value, name))

    def advance(self, name: str, by: int = 1) -> int:
        """Adds to a number and returns what it was before."""
        before = self.meta(name)
        self.set_meta(name, before + by)
        return before

    def count(self, kind: str, name: str, by: int = 1) -> None:
        self.db.execute(
            "INSERT INTO counters VALUES (?, ?, ?) ON CONFLICT (kind, name) DO UPDATE SET n = n + excluded.n",
            (kind, name, by),
        )

    def counters(self, kind: str) -> dict[str, int]:
        return {row["name"]: row["n"] for row in self.db.execute("SELECT * FROM counters WHERE kind = ?", (kind,))}


@contextmanager
def transaction(db: sqlite3.Connection, settings: ReplaySettings, now: float) -> Iterator[Transaction]:
    """All or nothing: commits at the end, rolls back on any exception."""
    try:
        db.execute("BEGIN IMMEDIATE")
        yield Transaction(db, settings, now)
        db.execute("COMMIT")
    except BaseException:
        if (
            db.in_transaction
        ):  # SQLite has rolled back by itself after some errors: a full disk, an interrupted statement
            db.execute("ROLLBACK")
        raise
