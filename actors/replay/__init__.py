"""The replay buffer: a durable store of tickets, trajectories and batches, and the Ray actor around it. See
docs/data.md.

`store` needs no Ray; `actor` does and is imported by name: `from actors.replay.actor import ReplayBuffer`.
"""

from actors.replay.policies import sampling_policies
from actors.replay.records import Batch, BatchGroup, Entry, LeaseLost, PutStatus, ReplaySettings, Ticket
from actors.replay.report import TrainedStep, read_ledger, read_trained, read_trajectories
from actors.replay.rewards import AwaitedReward, RewardAnswer, RewardStatus
from actors.replay.store import ReplayStore

__all__ = [
    "AwaitedReward",
    "Batch",
    "BatchGroup",
    "Entry",
    "LeaseLost",
    "PutStatus",
    "ReplaySettings",
    "ReplayStore",
    "RewardAnswer",
    "RewardStatus",
    "Ticket",
    "TrainedStep",
    "read_ledger",
    "read_trained",
    "read_trajectories",
    "sampling_policies",
]
