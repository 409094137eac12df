"""The store's process is killed with SIGKILL at random moments, again and again; the account never loses or doubles
anything.

The victim (`tests.chaos.replay_victim`) prints a line after each acknowledgement that returned. What it printed is what
its client knows; the file must agree.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.replay import ReplayStore
from tests.chaos.replay_victim import SETTINGS, deliver

LIVES = 15


@pytest.mark.slow
def test_no_group_is_lost_or_trained_twice_however_often_the_process_is_killed(tmp_path: Path) -> None:
    rng = random.Random(0)
    path = tmp_path / "replay.db"
    known: set[int] = set()  # task indices whose training a client has seen, or that survived a death
    acknowledged = 0
    for life in range(LIVES):
        for line in live_and_die(path, life, after_s=rng.uniform(0.02, 0.4)):
            tasks = [int(task) for task in line.split()[1:]]
            assert not known & set(tasks), f"trained twice: {known & set(tasks)}"
            known |= set(tasks)
            acknowledged += 1
        store = ReplayStore(path, SETTINGS)
        trained = store.trained_task_indices()
        assert store.audit() == []
        assert len(set(trained)) == len(trained)
        assert known <= set(trained), f"acknowledged and then lost: {known - set(trained)}"
        assert len(set(trained) - known) <= SETTINGS.batch_groups, "more than the batch whose answer the kill swallowed"
        known = set(trained)
        store.close()
    assert acknowledged > 2 * LIVES, "hardly any work was done between the deaths"
    finish_everything(path)


def live_and_die(path: Path, life: int, after_s: float) -> list[str]:
    """Starts the victim, lets it work for a while, kills it. Returns the whole lines that it wrote."""
    command = [sys.executable, "-m", "tests.chaos.replay_victim", str(path), str(life)]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "at work\n"
        time.sleep(after_s)
    finally:
        victim.send_signal(signal.SIGKILL)
        output, _ = victim.communicate(timeout=30)
    assert victim.returncode == -signal.SIGKILL, f"it ended by itself: {output}"
    return output.split("\n")[:-1]


def finish_everything(path: Path) -> None:
    """What was in flight at the last death is still there: without a single new task, all of it ends trained or
    dropped."""
    store = ReplayStore(path, dataclasses.replace(SETTINGS, total_groups=0))
    issued = store.ledger().issued
    rng = random.Random(1)
    deadline = time.monotonic() + 30
    while store.ledger().generating + store.ledger().ready + store.ledger().leased:
        assert time.monotonic() < deadline, store.waiting_for()
        while (ticket := store.lease_ticket("last")) is not None:
            deliver(store, rng, "last", ticket)
        version = int(store.stats()["version"])
        batch = store.lease_batch("last", 1, version, patient=False)
        if batch is not None:
            store.ack(batch.batch_id, version + 1, version + 1)
            store.set_version(version + 1)
    ledger = store.ledger()
    assert ledger.issued == issued == ledger.trained + ledger.dropped_total
    assert store.audit() == []
