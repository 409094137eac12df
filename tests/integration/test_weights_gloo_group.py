"""The group itself, between processes without vLLM: what its members need of memory, and what ends their waits."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from actors.weights.buckets import DIGEST_BYTES, cut, filled, put_together, receiving
from actors.weights.gloo_group import GlooGroup, GroupBroken, open_meeting
from actors.weights.publication import TensorRecord

MIB = 1 << 20
HERE = "127.0.0.1"
TENSOR, BUCKET, COUNT = 3 * MIB, 2 * MIB, 64  # every tensor in two buckets
FEW_MIB = 96  # half of the weights; 20 to 65 were seen, most of it what a process touches of its libraries at first
RECORDS = [TensorRecord(f"w{n}", "uint8", (TENSOR,), 0, 0, TENSOR, "") for n in range(COUNT)]


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """192 MiB, of which 3 are there at a time."""
    for n, record in enumerate(RECORDS):
        yield record.name, torch.full((TENSOR,), n, dtype=torch.uint8)


def peak_mib() -> float:
    """The most memory that this process has had."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def member(rank: int, size: int, port: int, deadline_s: float, pipe: Connection) -> None:
    """Takes tensors until there are all or the group breaks, and says how many, how much memory that took, and why it broke."""
    torch.set_num_threads(1)
    right = 0
    try:
        group = GlooGroup.join(HERE, port, rank=rank, size=size, deadline_s=60)
        pipe.send("joined")
        until = time.monotonic() + deadline_s
        buckets = cut([TENSOR] * COUNT, BUCKET)
        arriving = receiving(buckets, lambda buffer: group.receive(buffer, until))
        for n, (_, tensor) in enumerate(put_together(buckets, RECORDS, arriving, version=1)):
            right += bool((tensor == n).all())
            if n == 3:  # libraries have taken by now what they take once
                before = peak_mib()
        pipe.send((right, peak_mib() - before, ""))
    except GroupBroken as error:
        pipe.send((right, 0.0, str(error)))


class Group:
    """This process and two others."""

    def __init__(self, deadline_s: float = 20.0) -> None:
        context = multiprocessing.get_context("spawn")
        store, port = open_meeting(HERE, 60)
        self.pipes, self.processes = [], []
        for rank in (1, 2):
            ours, theirs = context.Pipe()
            process = context.Process(target=member, args=(rank, 3, port, deadline_s, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.group = GlooGroup(store, rank=0, size=3, here=HERE, deadline_s=60)
        assert [pipe.recv() for pipe in self.pipes] == ["joined", "joined"]

    def send(self, deadline_s: float = 20.0, at_bucket_20: signal.Signals | None = None) -> None:
        buckets = cut([TENSOR] * COUNT, BUCKET)
        memory = [torch.empty(BUCKET + DIGEST_BYTES, dtype=torch.uint8) for _ in range(2)]
        sending = []
        until = time.monotonic() + deadline_s
        for number, bucket in enumerate(filled(buckets, tensors(), RECORDS, memory, version=1, checksum=True)):
            if number == 20 and at_bucket_20 is not None:
                os.kill(self.processes[0].pid or 0, at_bucket_20)
            sending.append(self.group.send(bucket, until))
            if len(sending) > 1:
                sending.pop(0)()
        for wait in sending:
            wait()

    def end(self) -> None:
        self.group.leave()
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.end()


def test_both_sides_need_a_few_buckets_of_memory_for_any_amount_of_weights(group: Group) -> None:
    torch.set_num_threads(1)
    before = peak_mib()
    group.send()
    sender = peak_mib() - before
    for pipe in group.pipes:
        right, receiver, why = pipe.recv()
        assert (right, why) == (COUNT, "")
        assert receiver < FEW_MIB, f"{receiver} MiB for {COUNT * 3} MiB of weights in buckets of 2"
    assert sender < FEW_MIB


def test_a_member_that_is_killed_ends_the_sending_at_once_and_for_the_others_when_the_sender_leaves(
    group: Group,
) -> None:
    started = time.monotonic()
    with pytest.raises(GroupBroken) as broken:
        group.send(at_bucket_20=signal.SIGKILL)
    assert broken.value.ranks == (1,)
    group.group.leave()  # the error, which is held here, does not keep the connections
    right, _, why = group.pipes[1].recv()
    assert right < COUNT and re.search("closed|reset", why.lower()), why  # gloo says either
    assert time.monotonic() - started < 10


def test_a_member_that_hangs_is_named_at_the_deadline(group: Group) -> None:
    started = time.monotonic()
    with pytest.raises(GroupBroken) as broken:
        group.send(deadline_s=2, at_bucket_20=signal.SIGSTOP)
    assert broken.value.ranks == (1,) and 1.5 < time.monotonic() - started < 8


def test_members_that_never_come_are_named() -> None:
    store, port = open_meeting(HERE, 2)
    with pytest.raises(GroupBroken, match="did not form") as broken:
        GlooGroup(store, rank=0, size=3, here=HERE, deadline_s=2)
    assert broken.value.ranks == (1, 2)
    with pytest.raises(GroupBroken, match=f"no learner at {HERE}:{port + 1}"):
        GlooGroup.join(HERE, port + 1, rank=1, size=2, deadline_s=1)
