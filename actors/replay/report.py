"""What the buffer says about itself: the ledger, depths, whom a late batch waits for. Reads only."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from actors.replay import groups as group_rules
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
    counters: dict[str, dict[str, int]] = {"reissued": {}, "outcomes": {}, "puts": {}, "late_rewards": {}}
    for row in db.execute("SELECT * FROM counters WHERE kind IN ('reissued', 'outcomes', 'puts', 'late_rewards')"):
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
        unrewarded=counts.get("unrewarded", 0),
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


@dataclass(frozen=True)
class TrainedStep:
    """What was trained at one step, as it lay in the buffer: without the rewards that the step itself added."""

    step: int
    version: int  # of the weights that came of it
    trajectories: list[Trajectory]


def read_trained(path: str | Path) -> Iterator[TrainedStep]:
    """The steps whose trajectories are still kept, in order."""
    with _reading(path) as db:
        rows = db.execute(
            "SELECT g.trained_step AS step, g.trained_version AS version, p.data FROM groups g"
            " JOIN samples s ON s.task = g.task AND s.state = 'trained'"
            " JOIN payloads p ON p.task = s.task AND p.sample = s.sample AND p.finished"
            " WHERE g.trained_step IS NOT NULL ORDER BY g.trained_step, g.task, s.sample"
        )
        for (step, version), of_step in itertools.groupby(rows, key=lambda row: (row["step"], row["version"])):
            yield TrainedStep(step, version, [decode(row["data"]) for row in of_step])


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
            "waiting": ("waiting", "unrewarded", "arrived"),
            "generating": ("waiting", "running", "unrewarded", "arrived"),
            "unrewarded": ("unrewarded", "arrived"),
            "dropped": (),
        }.get(row["state"]) or (settled.get(row["state"], ""),)
        if row["sample"] not in allowed:
            wrong.append(f"{group_name(row['task'])} is {row['state']} but one of its samples is {row['sample']}")
    lost = db.execute(
        "SELECT count(*) FROM samples s LEFT JOIN payloads p ON p.task = s.task AND p.sample = s.sample AND p.finished"
        " WHERE s.state IN ('unrewarded', 'arrived', 'ready', 'leased') AND p.data IS NULL"
    ).fetchone()[0]
    if lost:
        wrong.append(f"{lost} finished samples have no payload")
    endless = db.execute(
        "SELECT count(*) FROM samples s WHERE s.state = 'unrewarded' AND NOT EXISTS (SELECT 1 FROM awaited_rewards a"
        " WHERE a.task = s.task AND a.sample = s.sample AND a.state = 'awaited')"
    ).fetchone()[0]
    if endless:
        wrong.append(f"{endless} samples wait for a reward that nothing will bring")
    return wrong


def stats(tx: Transaction) -> dict[str, float]:
    """Queue depths and sizes, by name."""
    groups = {row["state"]: row["n"] for row in tx.db.execute("SELECT state, count(*) AS n FROM groups GROUP BY state")}
    names = ("waiting", "generating", "unrewarded", "ready", "leased", "trained", "dropped")
    (payload_bytes,) = tx.db.execute(
        "SELECT (SELECT page_count FROM pragma_page_count) * (SELECT page_size FROM pragma_page_size)"
    ).fetchone()
    return {
        **{f"groups_{name}": groups.get(name, 0) for name in names},
        "groups_outstanding": tickets.outstanding(tx),
        "groups_admissible": tickets.admissible(tx),
        "groups_uniform": tx.counters("dropped_groups").get("uniform", 0),
        "groups_fruitless_since_batch": sum(group_rules.fruitless_since_batch(tx).values()),
        "next_task": tx.meta("next_task"),
        "version": tx.meta("version"),
        "file_bytes": payload_bytes,
    }


def no_spread(tx: Transaction) -> str | None:
    """Why no batch will ever come, when the bound on refills is reached and nothing is under way; else None."""
    dropped = group_rules.fruitless_since_batch(tx)
    total = sum(dropped.values())
    if total < tx.settings.max_fruitless_groups:
        return None
    unfinished, ready = (
        tx.db.execute(f"SELECT count(*) FROM groups WHERE state IN {states}").fetchone()[0]
        for states in ("('waiting', 'generating', 'unrewarded')", "('ready')")
    )
    if unfinished:
        return None
    bound = f"buffer.max_refills={tx.settings.max_refills} batches of {tx.settings.batch_groups}"
    if (few := dropped.get(group_rules.TOO_FEW, 0)) > total / 2:
        outcomes = tx.counters("outcomes")
        worst = max(outcomes, key=lambda outcome: outcomes[outcome], default="nothing")
        return (
            f"{few} of {total} groups in a row ({bound}) had fewer than {tx.settings.min_members} samples with a reward;"
            f" most trajectories ended as {worst}: look at `toolrl ledger`, and at the log for what failed (a prompt that"
            " is longer than rollout.max_context_tokens, a verifier that raises, a reward that does not come)"
        )
    return (
        f"{total} groups in a row had rewards without spread ({bound}), {ready} had some: these tasks are all too hard or"
        " all too easy for the policy; change their difficulty, begin with a cold start, raise loop.group_size or"
        " buffer.max_refills, or train on every group with buffer.drop_uniform_groups=false"
    )


def trained_task_indices(db: sqlite3.Connection) -> list[int]:
    """Task indices in the order in which they were trained."""
    rows = db.execute("SELECT task FROM groups WHERE state = 'trained' ORDER BY trained_step, task")
    return [row["task"] for row in rows]


def waiting_for(tx: Transaction) -> str:
    """For people: which groups are missing, who works on them and for how long."""
    depths = stats(tx)
    unrewarded = f" {depths['groups_unrewarded']:.0f} waiting for rewards," if depths["groups_unrewarded"] else ""
    lines = [
        f"{depths['groups_ready']:.0f} groups ready, {tx.settings.batch_groups} wanted;"
        f" {depths['groups_generating']:.0f} at workers, {depths['groups_waiting']:.0f} waiting for a worker,"
        f"{unrewarded} {depths['groups_admissible']:.0f} more may be issued"
    ]
    rows = tx.db.execute(
        "SELECT g.task, g.state, g.worker, g.size, g.leased_at, w.seen_at"
        " FROM groups g LEFT JOIN workers w ON w.worker = g.worker"
        " WHERE g.state IN ('waiting', 'generating', 'unrewarded') ORDER BY coalesce(g.leased_at, 0), g.task LIMIT ?",
        (_SHOWN_GROUPS,),
    ).fetchall()
    for row in rows:
        missing = tx.db.execute(
            "SELECT sample FROM samples WHERE task = ? AND state IN ('waiting', 'running', 'unrewarded')"
            " ORDER BY sample",
            (row["task"],),
        ).fetchall()
        who = "their rewards are to come" if row["state"] == "unrewarded" else "no worker has it"
        if row["worker"] is not None:
            held, silent = tx.now - row["leased_at"], tx.now - row["seen_at"]
            who = f"at worker {row['worker']} for {held:.0f} s, heard from {silent:.0f} s ago"
        samples = ", ".join(str(sample["sample"]) for sample in missing)
        lines.append(f"{group_name(row['task'])}: {len(missing)} of {row['size']} samples missing ({samples}); {who}")
    more = depths["groups_generating"] + depths["groups_waiting"] + depths["groups_unrewarded"] - len(rows)
    if more > 0:
        lines.append(f"and {more:.0f} more groups")
    dropped = tx.counters("dropped_groups")
    if dropped:
        lines.append("groups dropped so far: " + ", ".join(f"{reason} {n}" for reason, n in sorted(dropped.items())))
    return "\n".join(lines)
