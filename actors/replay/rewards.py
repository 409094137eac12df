"""Rewards that come after their trajectory: who waits for what, until when, and what becomes of a delivery.

    put, rewards awaited ──▶ unrewarded ──last one delivered──▶ arrived ──▶ … as any other
                                 └──────deadline passed──────▶ dropped:reward_missing

Invariants:
- A reward is recorded once, under the id of exactly the tokens that it was worked out for (`reward_id`).
- Every delivery is answered and counted; what is late, twice, unknown or no number changes nothing else.
- With `bootstrap_rewards` nobody waits: the trajectory is `arrived` at once, and takes rewards in until a learner has it.
- A claim keeps others from doing the same work for a while. It is no lease: whoever delivers first, counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from actors.replay.database import Transaction
from actors.replay.groups import drop_sample, settle
from actors.replay.records import Entry
from toolrl.reward_records import awaited_rewards, deliver
from toolrl.trajectory import Outcome, Trajectory
from toolrl.trajectory_codec import decode, encode

# What became of one delivered reward.
# accepted: it is in the trajectory.
# duplicate: it was before.
# late: its deadline has passed, or a learner has the trajectory, or it was given up.
# unknown: nothing under this id waits for it, or has been waiting for long.
# invalid: not a finite number, nor one a policy turn.
RewardStatus = Literal["accepted", "duplicate", "late", "unknown", "invalid"]

_OPEN = ("unrewarded", "arrived", "ready")  # states of a sample whose rewards can still change


@dataclass(frozen=True, slots=True)
class RewardAnswer:
    """What became of a delivered reward, and why."""

    status: RewardStatus
    why: str = ""


@dataclass(frozen=True, slots=True)
class AwaitedReward:
    """A finished trajectory that waits for the reward `name`; the reward is to be delivered for `trajectory_id`."""

    trajectory_id: str
    name: str
    seconds_left: float
    trajectory: Trajectory


def begin(tx: Transaction, task: int, entry: Entry) -> bool:
    """Notes what a trajectory waits for. Returns whether its group has to wait, too."""
    tx.db.executemany(
        "INSERT OR REPLACE INTO awaited_rewards (trajectory, name, task, sample, state, until)"
        " VALUES (?, ?, ?, ?, 'awaited', ?)",
        [
            (entry.reward_id, name, task, entry.sample_index, tx.now + tx.settings.reward_deadline_s)
            for name in entry.awaited
        ],
    )
    return bool(entry.awaited) and not tx.settings.bootstrap_rewards


def take_in(tx: Transaction, trajectory: str, name: str, value: Any) -> RewardAnswer:
    """One delivered reward; counts what became of it."""
    expire(tx)
    answer = _take_in(tx, trajectory, name, value)
    tx.count("late_rewards", answer.status)
    return answer


def _take_in(tx: Transaction, trajectory: str, name: str, value: Any) -> RewardAnswer:
    row = tx.db.execute(
        "SELECT a.*, s.state AS sample_state FROM awaited_rewards a"
        " JOIN samples s ON s.task = a.task AND s.sample = a.sample WHERE a.trajectory = ? AND a.name = ?",
        (trajectory, name),
    ).fetchone()
    if row is None:
        return RewardAnswer("unknown", _unknown(tx, trajectory, name))
    if row["state"] == "delivered":
        return RewardAnswer("duplicate", f"{trajectory} has its reward {name!r} already; the first one counts")
    if row["state"] == "closed" or row["sample_state"] not in _OPEN:
        return RewardAnswer(
            "late", f"{trajectory} waits for {name!r} no more: rewards.late.deadline_s is over, or a learner has it"
        )
    place = (row["task"], row["sample"])
    (data,) = tx.db.execute("SELECT data FROM payloads WHERE task = ? AND sample = ?", place).fetchone()
    rewarded = decode(data)
    try:
        deliver(rewarded, name, value)
    except ValueError as error:
        return RewardAnswer("invalid", str(error))
    tx.db.execute("UPDATE payloads SET data = ? WHERE task = ? AND sample = ?", (encode(rewarded), *place))
    tx.db.execute("UPDATE samples SET reward = ? WHERE task = ? AND sample = ?", (rewarded.reward, *place))
    tx.db.execute(
        "UPDATE awaited_rewards SET state = 'delivered' WHERE trajectory = ? AND name = ?", (trajectory, name)
    )
    if row["sample_state"] == "unrewarded" and not awaited_rewards(rewarded):
        assert rewarded.outcome is not None
        tx.count("outcomes", rewarded.outcome.value)
        tx.db.execute("UPDATE samples SET state = 'arrived' WHERE task = ? AND sample = ?", place)
        settle(tx, row["task"])
    return RewardAnswer("accepted")


def _unknown(tx: Transaction, trajectory: str, name: str) -> str:
    names = tx.db.execute("SELECT name FROM awaited_rewards WHERE trajectory = ?", (trajectory,)).fetchall()
    if names:
        return f"{trajectory} waits for {', '.join(repr(row['name']) for row in names)} and not for {name!r}"
    return (
        f"no trajectory {trajectory!r} waits for a reward: it was never delivered here, was thrown away and tried "
        "again, or is over for long; use the id that the buffer gave with the trajectory, or `reward_id`"
    )


def claim(tx: Transaction, name: str, limit: int, claim_s: float) -> list[AwaitedReward]:
    """Up to `limit` trajectories that wait for `name` and that nobody claims, the most urgent first."""
    expire(tx)
    rows = tx.db.execute(
        "SELECT a.trajectory, a.until, p.data FROM awaited_rewards a"
        " JOIN samples s ON s.task = a.task AND s.sample = a.sample"
        " JOIN payloads p ON p.task = a.task AND p.sample = a.sample AND p.finished"
        " WHERE a.name = ? AND a.state = 'awaited' AND a.claimed_until <= ? AND s.state IN (?, ?, ?)"
        " ORDER BY a.until, a.trajectory LIMIT ?",
        (name, tx.now, *_OPEN, limit),
    ).fetchall()
    tx.db.executemany(
        "UPDATE awaited_rewards SET claimed_until = ? WHERE trajectory = ? AND name = ?",
        [(tx.now + claim_s, row["trajectory"], name) for row in rows],
    )
    return [AwaitedReward(row["trajectory"], name, row["until"] - tx.now, decode(row["data"])) for row in rows]


def expire(tx: Transaction) -> None:
    """Ends what has passed its deadline: those trajectories are out of their groups, which go on."""
    rows = tx.db.execute(
        "SELECT DISTINCT a.task, a.sample, s.state FROM awaited_rewards a"
        " JOIN samples s ON s.task = a.task AND s.sample = a.sample WHERE a.state = 'awaited' AND a.until < ?",
        (tx.now,),
    ).fetchall()
    if not rows:
        return
    closed = tx.db.execute(
        "UPDATE awaited_rewards SET state = 'closed' WHERE state = 'awaited' AND until < ?", (tx.now,)
    )
    tx.count("late_rewards", "never_came", closed.rowcount)
    missing = [row for row in rows if row["state"] == "unrewarded"]
    for row in missing:
        give_up(tx, row["task"], row["sample"])
    for task in sorted({row["task"] for row in missing}):
        settle(tx, task)


def give_up(tx: Transaction, task: int, sample: int) -> None:
    """Waits for a sample's rewards no more. The group has to be settled afterwards."""
    tx.count("outcomes", Outcome.REWARD_MISSING.value)
    drop_sample(tx, task, sample, Outcome.REWARD_MISSING.value)


def forget(tx: Transaction) -> None:
    """Frees what answered deliveries that came too late, once that is long ago."""
    tx.db.execute(
        "DELETE FROM awaited_rewards WHERE state <> 'awaited' AND until < ?",
        (tx.now - tx.settings.reward_deadline_s,),
    )


def renew(tx: Transaction) -> None:
    """While the store was down nothing could be delivered, so nothing may be late for that."""
    tx.db.execute(
        "UPDATE awaited_rewards SET until = max(until, ?), claimed_until = 0 WHERE state = 'awaited'",
        (tx.now + min(tx.settings.reward_deadline_s, tx.settings.worker_lease_s),),
    )
