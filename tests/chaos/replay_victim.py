"""A process that works on a replay store at random until it is killed. `python -m tests.chaos.replay_victim PATH
SEED`."""

from __future__ import annotations

import random
import sys

from actors.replay import ReplaySettings, ReplayStore, Ticket
from tests.replay_samples import sample
from toolrl.trajectory import Outcome

# Leases so short that they run out, also those that a killed predecessor held.
SETTINGS = ReplaySettings(
    group_size=3,
    batch_groups=2,
    max_staleness=2,
    max_attempts=3,
    worker_lease_s=0.05,
    learner_lease_s=0.05,
    keep_trained_steps=5,
)
OUTCOMES = [*[Outcome.ANSWERED] * 12, Outcome.INFRA_ERROR, Outcome.REWARD_MISSING, Outcome.STALE]


def deliver(store: ReplayStore, rng: random.Random, worker: str, ticket: Ticket) -> None:
    """Everything that the ticket asks for, with random ends, some of it too old."""
    version = int(store.stats()["version"])
    finished = [
        sample(
            ticket.group_id,
            index,
            versions=[max(0, version - rng.choice([0, 0, 0, 1, 3]))] * 200,
            reward=rng.choice([0.0, 1.0]),
            outcome=rng.choice(OUTCOMES),
        )
        for index in ticket.samples_missing
    ]
    store.put(worker, finished)


def rollout(store: ReplayStore, rng: random.Random) -> None:
    """A ticket, worked off, half done, or forgotten."""
    worker = rng.choice(["w0", "w1"])
    ticket = store.lease_ticket(worker)
    if ticket is None:
        return
    what = rng.random()
    if what < 0.1:
        unfinished = [sample(ticket.group_id, index, outcome=None) for index in ticket.samples_missing]
        store.put_progress(worker, unfinished)
    elif what < 0.15:
        store.release_worker(worker)
    elif what < 0.9:
        deliver(store, rng, worker, ticket)


def learn(store: ReplayStore, rng: random.Random) -> None:
    """A batch, trained or given back or forgotten. Prints the step and its tasks after an acknowledgement that
    returned."""
    version = int(store.stats()["version"])
    batch = store.lease_batch("learner", SETTINGS.batch_groups, version, patient=rng.random() < 0.9)
    if batch is None:
        return
    what = rng.random()
    if what < 0.1:
        store.nack(batch.batch_id)
    elif what < 0.95:
        store.ack(batch.batch_id, version + 1, version + 1)
        print(version + 1, *[group.task_index for group in batch.groups], flush=True)
        store.set_version(version + 1)


def main() -> None:
    store = ReplayStore(sys.argv[1], SETTINGS)
    rng = random.Random(int(sys.argv[2]))
    print("at work", flush=True)
    while True:
        (rollout if rng.random() < 0.7 else learn)(store, rng)


if __name__ == "__main__":
    main()
