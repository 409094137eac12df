"""Slow episodes are trained as often as fast ones, and a long run takes no more room than a short one: a simulation of an
asynchronous run with a clock of its own, its episodes as long as their tools and rewards take.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from pathlib import Path

import pytest

from actors.replay import Entry, ReplaySettings, ReplayStore
from tests.replay_samples import Clock, sample
from toolrl.reward_records import await_rewards, reward_id

EPISODES_AT_ONCE = 64
STEPS = 156  # of 64 trajectories: 10,000
STEP_S = 3.0


def simulate(
    store: ReplayStore,
    clock: Clock,
    steps: int,
    uniform_share: float = 0.0,
    late_rewards: bool = False,
    file_bytes: list[float] | None = None,
) -> tuple[list[float], list[float]]:
    """Episodes with a heavy tail of lengths run at once; the learner takes a batch whenever it is free.

    Args:
        uniform_share: of the groups, whatever their lengths, whose rewards are equal.
        late_rewards: each trajectory's reward comes with a heavy tail of delays, which count in its length.
        file_bytes: the size of the store's file after each step is appended.

    Returns:
        Lengths (seconds) of what was asked for and of what was trained, one for each sample. Groups with equal rewards
        that the store drops are in neither.
    """
    rng = random.Random(0)
    is_uniform = {task: random.Random(task).random() < uniform_share for task in range(100 * steps)}
    delay: dict[tuple[int, int], float] = {}  # of rewards, after the episode
    length: dict[tuple[int, int], float] = {}  # both together
    rewards_due: list[str] = []
    events: list[tuple[float, int, int]] = []  # end, task, sample; task -1: the learner; -2: a reward, by number
    queue: list[tuple[int, int]] = []
    begun_with: dict[tuple[int, int], int] = {}
    version, step, busy, running = 0, 0, False, 0
    trained: list[float] = []
    arrived: Counter[int] = Counter()
    ask = may_begin = True
    while step < steps:
        if ask and not busy:
            ask = False
            batch = store.lease_batch("learner", 16, version)
            if batch is not None:
                tasks = [group.task_index for group in batch.groups]
                trained += [length[task, i] for task in tasks for i in range(4)]
                step += 1
                store.ack(batch.batch_id, step, version + 1)
                if file_bytes is not None:
                    file_bytes.append(store.stats()["file_bytes"])
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
            if place not in length:
                delay[place] = rng.lognormvariate(0.0, 1.0) if late_rewards else 0.0
                length[place] = rng.lognormvariate(0.0, 1.0) + delay[place]
            begun_with[place] = version
            heapq.heappush(events, (clock.now + length[place] - delay[place], *place))
            running += 1
        clock.now, task, index = heapq.heappop(events)
        if task == -2:
            assert store.deliver_reward(rewards_due[index], "judge", float(index % 7)).status == "accepted"
            ask = True
        elif task == -1:
            busy, version = False, version + 1
            store.set_version(version)
            ask = may_begin = True
        else:
            running -= 1
            versions = (begun_with[task, index], version)
            reward = 0.4 if is_uniform[task] else None
            made = sample(f"g{task:06d}", index, versions=versions, reward=reward)
            if late_rewards:
                await_rewards(made, {"judge": 1.0})
                heapq.heappush(events, (clock.now + delay[task, index], -2, len(rewards_due)))
                rewards_due.append(reward_id(made))
            store.put("w0", [Entry.of(made)])
            arrived[task] += 1
            ask = ask or arrived[task] == 4
            may_begin = may_begin or (is_uniform[task] and arrived[task] == 4)  # dropped: room for another
    done = set(store.trained_task_indices())
    asked = [seconds for (task, _), seconds in length.items() if task <= max(done) and not is_uniform[task]]
    return asked, trained


@pytest.mark.slow
def test_trained_lengths_are_those_that_were_asked_for(tmp_path: Path) -> None:
    clock = Clock()
    settings = ReplaySettings(
        group_size=4, batch_groups=16, max_staleness=1, drop_uniform_groups=False, worker_lease_s=1e9
    )
    store = ReplayStore(tmp_path / "replay.db", settings, clock)
    asked, trained = simulate(store, clock, STEPS)
    assert len(trained) == STEPS * 64
    assert sum(trained) / len(trained) == pytest.approx(sum(asked) / len(asked), rel=0.02)
    slow = sorted(asked)[-len(asked) // 100]
    assert sum(t >= slow for t in trained) / len(trained) == pytest.approx(0.01, rel=0.15), "the slowest hundredth"
    assert store.ledger().reissued == {}, "nothing was generated to be thrown away"
    assert store.audit() == []


@pytest.mark.slow
def test_dropping_groups_without_spread_and_refilling_does_not_lean_towards_short_ones(tmp_path: Path) -> None:
    clock, steps = Clock(), 60
    settings = ReplaySettings(group_size=4, batch_groups=16, max_staleness=1, worker_lease_s=1e9)
    store = ReplayStore(tmp_path / "replay.db", settings, clock)
    asked, trained = simulate(store, clock, steps, uniform_share=0.4)
    account = store.ledger()
    assert len(trained) == steps * 64, "every step was full"
    assert account.dropped["uniform"] / (account.dropped["uniform"] + account.trained) == pytest.approx(0.4, abs=0.05)
    assert sum(trained) / len(trained) == pytest.approx(sum(asked) / len(asked), rel=0.03)
    slow = sorted(asked)[-len(asked) // 50]
    assert sum(t >= slow for t in trained) / len(trained) == pytest.approx(0.02, rel=0.2), "the slowest fiftieth"
    assert store.audit() == []


@pytest.mark.slow
def test_late_rewards_do_not_lean_towards_early_ones_and_a_long_run_takes_no_more_room(tmp_path: Path) -> None:
    clock, steps, file_bytes = Clock(), 100, []
    settings = ReplaySettings(
        group_size=4,
        batch_groups=16,
        max_staleness=1,
        drop_uniform_groups=False,
        worker_lease_s=1e9,
        reward_deadline_s=100.0,
        keep_trained_steps=10,
    )
    store = ReplayStore(tmp_path / "replay.db", settings, clock)
    asked, trained = simulate(store, clock, steps, late_rewards=True, file_bytes=file_bytes)
    assert len(trained) == steps * 64
    assert sum(trained) / len(trained) == pytest.approx(sum(asked) / len(asked), rel=0.03)
    slow = sorted(asked)[-len(asked) // 50]
    assert sum(t >= slow for t in trained) / len(trained) == pytest.approx(0.02, rel=0.2), "the slowest fiftieth"
    ledger = store.ledger()
    assert (ledger.reissued, ledger.dropped) == ({}, {})
    assert ledger.late_rewards["accepted"] >= steps * 64
    assert store.audit() == []
    bytes_a_sample = (file_bytes[-1] - file_bytes[40]) / (64 * (steps - 41))
    assert bytes_a_sample < 200, "of what was trained long ago the account is kept, and nothing else"
