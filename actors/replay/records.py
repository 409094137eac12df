"""What goes into the replay buffer and what comes out of it. Plain data, picklable, no SQL."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolrl.config import RunConfig
from toolrl.config_model_rewards import credits_turns
from toolrl.reward_records import awaited_rewards, reward_id
from toolrl.rewards.group_rewards import GroupRewards
from toolrl.trajectory import Outcome, Trajectory
from toolrl.trajectory_codec import decode, encode

# What became of one delivered trajectory.
# accepted: it fills its place.
# reissued: it was thrown away and its sample will be tried again.
# dropped: its sample is given up.
# duplicate: the place was filled before, or the failed try is no longer the one that counts.
# closed: the sample had been given up.
# fenced: it comes from before a rollback.
PutStatus = Literal["accepted", "reissued", "dropped", "duplicate", "closed", "fenced"]


class LeaseLost(RuntimeError):
    """The batch or ticket belongs to somebody else by now, or went back to the queue."""


@dataclass(frozen=True)
class ReplaySettings:
    """What the store needs to know of a run. May change between two openings of the same file."""

    group_size: int = 8
    batch_groups: int = 16  # groups in one training step
    total_groups: int | None = None  # groups that are to be trained in the whole run; None: no end
    max_staleness: int = 1
    sampling: str = "fifo"
    drop_uniform_groups: bool = True
    group_rewards: GroupRewards | None = None  # by which a group can teach although its recorded rewards are equal
    turn_credit: bool = False  # so it can when single turns earned differently, whatever that adds up to
    max_refills: int = 10  # batches of groups without spread since the last batch, beyond which nothing is issued
    max_attempts: int = 4
    worker_lease_s: float = 60.0
    learner_lease_s: float = 600.0
    ticket_deadline_s: float | None = None  # no heartbeat holds a ticket for longer
    reward_deadline_s: float = 300.0  # a finished trajectory waits so long for late rewards
    bootstrap_rewards: bool = False  # it does not: what has not come when it is trained is the critic's to judge
    keep_trained_steps: int = 40  # payloads of older steps are pruned; a rollback to before them generates anew
    seed: int = 0
    first_task_index: int = 0  # for a new file only

    def __post_init__(self) -> None:
        sizes = ("group_size", "batch_groups", "max_refills", "max_attempts")
        for name in (*sizes, "worker_lease_s", "learner_lease_s", "reward_deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"replay buffer: {name} is {getattr(self, name)}; it must be positive")
        if self.max_staleness < 0:
            raise ValueError(
                f"replay buffer: max_staleness is {self.max_staleness}; 0 is synchronous, there is no less"
            )

    @property
    def min_members(self) -> int:
        """Trained members without which a group compares nothing and is dropped."""
        return min(2, self.group_size)

    @property
    def max_outstanding_groups(self) -> int:
        """The admission bound: more would be generated only to be thrown away."""
        return (self.max_staleness + 1) * self.batch_groups

    @property
    def max_fruitless_groups(self) -> int:
        """Groups without spread between two batches, beyond which the tasks teach nothing and no more are issued."""
        return self.max_refills * self.batch_groups

    @classmethod
    def of(cls, config: RunConfig) -> ReplaySettings:
        """The settings that a run's config implies."""
        return cls(
            group_size=config.loop.group_size,
            batch_groups=config.loop.groups_per_step,
            total_groups=config.loop.steps * config.loop.groups_per_step,
            max_staleness=config.buffer.max_staleness,
            sampling=config.buffer.sampling,
            drop_uniform_groups=config.buffer.drop_uniform_groups,
            group_rewards=GroupRewards.of(config.rewards),
            turn_credit=credits_turns(config),
            max_refills=config.buffer.max_refills,
            max_attempts=config.buffer.max_attempts,
            worker_lease_s=config.rollout.lease_s,
            learner_lease_s=config.buffer.learner_lease_s,
            ticket_deadline_s=config.loop.batch_deadline_s / 2,
            reward_deadline_s=config.rewards.late.deadline_s,
            bootstrap_rewards=config.rewards.late.bootstrap,
            keep_trained_steps=max(1, config.loop.checkpoint_every_steps) * max(1, config.loop.keep_checkpoints),
            seed=config.seed,
        )


def group_name(task_index: int) -> str:
    """The group id of a task. One task index has one group in a run, however often it is tried."""
    return f"g{task_index:06d}"


def task_index_of(group_id: str) -> int:
    """The inverse of `group_name`. Raises ValueError for anything else."""
    if group_id[:1] != "g" or not group_id[1:].isdecimal():
        raise ValueError(f"group id {group_id!r} was not issued by a replay buffer; use the ticket's group_id")
    return int(group_id[1:])


def sample_seed(seed: int, task_index: int, sample_index: int) -> int:
    """The sampling seed of one sample, 31 bits. The same however often it is tried and whoever runs it."""
    digest = hashlib.blake2b(f"{seed}/{task_index}/{sample_index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(slots=True)
class Ticket:
    """One group to be worked on by the worker that leased it: only the samples in `samples_missing`."""

    group_id: str
    task_index: int
    group_size: int
    samples_missing: list[int]
    attempts: dict[int, int]  # by sample index, 1 for the first try
    seeds: dict[int, int]  # by sample index
    version: int  # the engine should serve these weights or newer
    progress: dict[int, Trajectory] = field(default_factory=dict)  # unfinished episodes, up to their last turn boundary


@dataclass(slots=True)
class Entry:
    """A trajectory on its way into the buffer: encoded, with what the store must know beside it."""

    group_id: str
    sample_index: int
    outcome: Outcome | None  # None: progress of an unfinished episode
    reward: float
    oldest_version: int | None
    newest_version: int | None
    payload: bytes
    reward_id: str = ""  # under which late rewards are delivered
    awaited: tuple[str, ...] = ()  # names of rewards that are still to come

    @classmethod
    def of(cls, trajectory: Trajectory) -> Entry:
        """Checks and encodes. Raises ValueError for a trajectory that contradicts itself or with a reward of NaN."""
        trajectory.check()
        if not math.isfinite(trajectory.reward):
            raise ValueError(
                f"trajectory {trajectory.id}: reward {trajectory.reward} from {trajectory.rewards}; "
                "a reward that is not a number is to be delivered as outcome reward_missing"
            )
        awaited = tuple(awaited_rewards(trajectory))
        return cls(
            group_id=trajectory.group_id,
            sample_index=trajectory.sample_index,
            outcome=trajectory.outcome,
            reward=trajectory.reward,
            oldest_version=trajectory.oldest_version,
            newest_version=max(trajectory.versions, default=None),
            payload=encode(trajectory),
            reward_id=reward_id(trajectory) if awaited else "",
            awaited=awaited,
        )


def entries_of(items: Sequence[Trajectory | Entry]) -> list[Entry]:
    """Entries of whatever is delivered; worker processes encode their own, so that the buffer's process need not."""
    return [item if isinstance(item, Entry) else Entry.of(item) for item in items]


@dataclass(slots=True)
class BatchGroup:
    """One complete group, its trained members only, still encoded."""

    group_id: str
    task_index: int
    payloads: list[bytes]

    def trajectories(self) -> list[Trajectory]:
        """In sample order."""
        return [decode(payload) for payload in self.payloads]


@dataclass(slots=True)
class Batch:
    """What the learner leased. It is to be acknowledged when, and only when, the step that used it counts."""

    batch_id: int
    groups: list[BatchGroup]

    def trajectories(self) -> list[list[Trajectory]]:
        """Groups of trajectories."""
        return [group.trajectories() for group in self.groups]
