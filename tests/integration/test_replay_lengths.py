"""Slow episodes are trained as often as fast ones: a simulation of an asynchronous run with a clock of its own."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from pathlib import Path

import pytest

from actors.replay import Entry, ReplaySettings, ReplayStore
from tests.replay_samples import Clock, sample

EPISODES_AT_ONCE = 64
STEPS = 156  # of 64 trajectories: 10,000
STEP_S = 3.0


def simulate(store: ReplayStore, clock: Clock) -> tuple[list[float], list[float]]:
    """Episodes with a heavy tail of lengths run at once; the learner takes a batch whenever it is free.

    Returns:
        Lengths (seconds) of what was asked for and of what was trained, one for each sample.
    """
    rng = random.Random(0)
    length: dict[tuple[int, int], float] = {}
    events: list[tuple[float, int, int]] = []  # end, task, sample; task -1: the learner
    queue: list[tuple[int, int]] = []
    begun_with: dict[tuple[int, int], int] = {}
    version, step, busy, running = 0, 0, False, 0
    trained: list[float] = []
    arrived: Counter[int] = Counter()
    ask = may_begin = True
    while step < STEPS:
        if ask and not busy:
            ask = False
            batch = store.lease_batch("learner", 16, version)
            if batch is not None:
                tasks = [group.task_index for group in batch.groups]
                trained += [length[task, i] for task in tasks for i in range(4)]
                step += 1
                store.ack(batch.batch_id, step, version + 1)
                busy = True
                heapq.heappush(events, (clock.now + STEP_S, -1, 0))
        while running < EPISODES_AT_ONCE:
            if not queue:
                ticket = store.lease_ticket("w0") if may_begin else None
                may_begin = ticket is not None
                if ticket is None:
                    break
                queue += [(ticket.task_index, i) for i in ticket.samples_missing]
            place = queue.pop(0)
            length.setdefault(place, rng.lognormvariate(0.0, 1.0))
            begun_with[place] = version
            heapq.heappush(events, (clock.now + length[place], *place))
            running += 1
        clock.now, task, index = heapq.heappop(events)
        if task < 0:
            busy, version = False, version + 1
            store.set_version(version)
            ask = may_begin = True
        else:
            running -= 1
            versions = (begun_with[task, index], version)
            store.put("w0", [Entry.of(sample(f"g{task:06d}", index, versions=versions))])
            arrived[task] += 1
            ask = ask or arrived[task] == 4
    done = set(store.trained_task_indices())
    asked = [seconds for (task, _), seconds in length.items() if task <= max(done)]
    return asked, trained


@pytest.mark.slow
def test_trained_lengths_are_those_that_were_asked_for(tmp_path: Path) -> None:
    clock = Clock()
    settings = ReplaySettings(
        group_size=4, batch_groups=16, max_staleness=1, drop_uniform_groups=False, worker_lease_s=1e9
    )
    store = ReplayStore(tmp_path / "replay.db", settings, clock)
    asked, trained = simulate(store, clock)
    assert len(trained) == STEPS * 64
    assert sum(trained) / len(trained) == pytest.approx(sum(asked) / len(asked), rel=0.02)
    slow = sorted(asked)[-len(asked) // 100]
    assert sum(t >= slow for t in trained) / len(trained) == pytest.approx(0.01, rel=0.15), "the slowest hundredth"
    assert store.ledger().reissued == {}, "nothing was generated to be thrown away"
    assert store.audit() == []
