"""Small trajectories for tests of the replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.replay import ReplayStore, Ticket
from toolrl.trajectory import Outcome, Trajectory, Turn

# Opens the store of a test, or opens it again; the fixture `make` of tests/unit/replay.
MakeStore = Callable[..., ReplayStore]


@dataclass
class Clock:
    """A clock that stands still until it is moved."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def sample(
    group_id: str,
    index: int,
    *,
    versions: Sequence[int] = (0, 0),
    reward: float | None = None,
    outcome: Outcome | None = Outcome.ANSWERED,
    name: str = "",
) -> Trajectory:
    """A trajectory of one policy turn. Its reward differs from its neighbours' unless given."""
    turn = Turn("policy", list(range(len(versions))), [-0.5] * len(versions), list(versions), "stop")
    return Trajectory(
        id=name or f"{group_id}-{index}",
        group_id=group_id,
        task_id=group_id,
        sample_index=index,
        prompt_ids=[1, 2, 3],
        turns=[turn],
        outcome=outcome,
        rewards={"outcome": float(index % 2) if reward is None else reward},
    )


def finish(store: ReplayStore, worker: str, ticket: Ticket, *, version: int = 0) -> None:
    """Delivers everything that the ticket asks for."""
    finished = [sample(ticket.group_id, index, versions=(version, version)) for index in ticket.samples_missing]
    assert set(store.put(worker, finished)) == {"accepted"}


def all_tickets(store: ReplayStore, worker: str = "w0", engine_version: int | None = None) -> list[Ticket]:
    """Every ticket that the store gives out now."""
    tickets = []
    while (ticket := store.lease_ticket(worker, engine_version=engine_version)) is not None:
        tickets.append(ticket)
    return tickets


def train(store: ReplayStore, n_groups: int, step: int, version: int) -> list[int]:
    """One step of a learner whose weights are `version`: leases, acknowledges, publishes. Returns the task indices."""
    batch = store.lease_batch("learner", n_groups, version)
    assert batch is not None, store.waiting_for()
    store.ack(batch.batch_id, step, version + 1)
    store.set_version(version + 1)
    return [group.task_index for group in batch.groups]
