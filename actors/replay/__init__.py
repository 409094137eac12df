"""The replay buffer: a durable store of tickets, trajectories and batches, and the Ray actor around it. See
docs/data.md.

`store` needs no Ray; `actor` does and is imported by name: `from actors.replay.actor import ReplayBuffer`.
"""

from actors.replay.policies import sampling_policies
from actors.replay.records import Batch, BatchGroup, Entry, LeaseLost, PutStatus, ReplaySettings, Ticket
from actors.replay.report import read_ledger, read_trajectories
from actors.replay.store import ReplayStore

__all__ = [
    "Batch",
    "BatchGroup",
    "Entry",
    "LeaseLost",
    "PutStatus",
    "ReplaySettings",
    "ReplayStore",
    "Ticket",
    "read_ledger",
    "read_trajectories",
    "sampling_policies",
]
