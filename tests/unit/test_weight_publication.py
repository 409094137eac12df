"""Publishing, checksums and shared memory: what the learner sends is what an engine may load."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.weights import Publication, Publisher, TensorRecord
from actors.weights.publication import ALIGNMENT, checksum_of
from actors.weights.publisher import PIECE_BYTES, EmptyPublication
from actors.weights.shared_memory import NoSharedMemory, SlotGone, Slots, available_bytes, identity, mapped, reading

TENSORS = {
    "embed": torch.arange(700, dtype=torch.float32).reshape(70, 10),
    "norm": torch.linspace(-1, 1, 5, dtype=torch.bfloat16),
    "scale": torch.tensor(0.5),
    "big": torch.randn(64, 32, generator=torch.Generator().manual_seed(0)),
    "ids": torch.arange(9, dtype=torch.int64),
    "transposed": torch.arange(12.0).reshape(3, 4).T,
}


def content(publication: Publication, record: TensorRecord) -> np.ndarray:
    bucket = mapped(publication.paths[record.bucket], publication.sizes[record.bucket])
    return bucket[record.offset : record.offset + record.nbytes]


def unpack(publication: Publication, record: TensorRecord) -> torch.Tensor:
    flat = torch.from_numpy(content(publication, record).copy())
    return flat.view(getattr(torch, record.dtype)).view(record.shape)


def by_name(publication: Publication) -> dict[str, TensorRecord]:
    return {record.name: record for record in publication.tensors}


@pytest.mark.parametrize("bucket_bytes", [1, 100, 3000, 1 << 20])
def test_buckets_give_the_tensors_back(bucket_bytes: int) -> None:
    publisher = Publisher(bucket_bytes=bucket_bytes)
    publication = publisher.publish(TENSORS.items(), 3)
    assert [record.name for record in publication.tensors] == list(TENSORS)
    assert len(publication.paths) == len(publication.sizes)
    for index, size in enumerate(publication.sizes):
        assert size <= bucket_bytes or sum(record.bucket == index for record in publication.tensors) == 1
    for record in publication.tensors:
        assert record.offset % ALIGNMENT == 0
        assert torch.equal(unpack(publication, record), TENSORS[record.name])


def test_floating_point_tensors_are_converted_and_checksummed_as_sent() -> None:
    publisher = Publisher()
    publication = publisher.publish(TENSORS.items(), 1, dtype=torch.bfloat16)
    records = by_name(publication)
    assert records["ids"].dtype == "int64"
    for name in ("big", "transposed", "scale"):
        record = records[name]
        assert torch.equal(unpack(publication, record), TENSORS[name].to(torch.bfloat16))
        assert record.checksum == checksum_of(name, "bfloat16", record.shape, content(publication, record))


def test_a_tensor_copied_in_pieces_has_the_checksum_of_the_whole() -> None:
    large = torch.arange(PIECE_BYTES // 2 + 3, dtype=torch.int32)  # two pieces and a rest
    publisher = Publisher()
    (record,) = (publication := publisher.publish([("large", large)], 1)).tensors
    assert torch.equal(unpack(publication, record), large)
    assert record.checksum == checksum_of("large", "int32", large.shape, large.view(torch.uint8).numpy())


def checksum(name: str, tensor: torch.Tensor) -> str:
    (record,) = Publisher().publish([(name, tensor)], 1).tensors
    return record.checksum


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 64 * 32 * 4 - 1), st.integers(1, 255))
def test_any_changed_byte_changes_the_checksum(position: int, change: int) -> None:
    damaged = TENSORS["big"].clone()
    damaged.view(-1).view(torch.uint8)[position] ^= change
    assert checksum("big", damaged) != checksum("big", TENSORS["big"])


def test_name_dtype_and_shape_are_part_of_the_checksum() -> None:
    whole = TENSORS["big"]
    different = {checksum("big", whole), checksum("other", whole), checksum("big", whole.view(32, 64))}
    different.add(checksum("big", whole.view(torch.int32)))
    assert len(different) == 4


def test_a_publications_checksum_is_that_of_all_its_tensors() -> None:
    def whole(tensors: dict[str, torch.Tensor], **options: Any) -> str:
        return Publisher().publish(tensors.items(), 1, **options).checksum

    assert whole(TENSORS) == whole(dict(TENSORS))
    assert whole(TENSORS) != whole(TENSORS | {"scale": torch.tensor(0.25)})
    assert whole(TENSORS, checksum=False) == ""


def test_an_empty_or_ambiguous_source_is_refused_and_the_version_before_stays() -> None:
    publisher = Publisher()
    before = publisher.publish(TENSORS.items(), 1)
    with pytest.raises(EmptyPublication, match="no tensor"):
        publisher.publish([], 2)
    with pytest.raises(EmptyPublication, match="norm twice"):
        publisher.publish([("norm", TENSORS["norm"]), ("norm", TENSORS["norm"])], 2)
    with reading(before.head, before.stamp):
        assert torch.equal(unpack(before, before.tensors[0]), TENSORS["embed"])


def test_records_survive_the_message_to_vllm() -> None:
    records = Publisher().publish(TENSORS.items(), 1).tensors
    assert tuple(TensorRecord.from_fields(record.fields()) for record in records) == records


def test_memory_is_used_again_and_the_latest_is_never_overwritten() -> None:
    publisher = Publisher(bucket_bytes=3000)
    publications = [publisher.publish([("w", torch.full((500,), float(v)))], v) for v in range(6)]
    assert len({publication.head for publication in publications}) == 2
    for old in publications[:4]:
        with pytest.raises(SlotGone, match="overwritten"), reading(old.head, old.stamp):
            pass
    for held in publications[4:]:
        with reading(held.head, held.stamp):
            assert unpack(held, held.tensors[0]).unique().item() == held.version


def test_what_is_being_read_is_not_overwritten() -> None:
    publisher = Publisher()
    first = publisher.publish(TENSORS.items(), 1)
    with reading(first.head, first.stamp):
        later = [publisher.publish([("w", torch.zeros(9))], version) for version in (2, 3, 4)]
        assert first.head not in {each.head for each in later}
        assert torch.equal(unpack(first, first.tensors[0]), TENSORS["embed"])
    assert publisher.publish(TENSORS.items(), 5).head == first.head


def test_a_mapping_shows_the_next_version_and_cannot_be_written() -> None:
    publisher = Publisher()
    first = publisher.publish([("w", torch.zeros(100))], 1)
    held = mapped(first.paths[0], first.sizes[0])
    publisher.publish([("w", torch.ones(100))], 2)
    again = publisher.publish([("w", torch.full((100,), 2.0))], 3)
    assert (again.paths, identity(again.paths[0])) == (first.paths, identity(first.paths[0]))
    assert set(held.view(np.float32)) == {2.0}
    with pytest.raises(ValueError, match="read-only"):
        held[0] = 1


def test_a_larger_model_gets_larger_memory() -> None:
    publisher = Publisher(bucket_bytes=100)
    for version, size in enumerate((10, 1000, 10, 5000)):
        tensor = torch.arange(size, dtype=torch.float32)
        publication = publisher.publish([("w", tensor), ("v", tensor)], version)
        assert all(torch.equal(unpack(publication, record), tensor) for record in publication.tensors)


def test_too_little_memory_is_said_with_the_remedy() -> None:
    with (
        Slots().writing() as (slot, _),
        pytest.raises(NoSharedMemory, match="MiB are free on this machine: use one with"),
    ):
        slot.bucket(0, 1 << 44).room(0, 1 << 44)
    assert 0 < available_bytes() < 1 << 44


def _publish_and_wait(to: Connection) -> None:
    publisher = Publisher()
    to.send([publisher.publish([("w", torch.arange(1 << 20))], version) for version in range(3)][-1])
    time.sleep(60)


def test_a_publisher_that_is_killed_leaves_nothing_and_its_reader_goes_on() -> None:
    before = set(os.listdir("/dev/shm"))
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_publish_and_wait, args=(theirs,))
    process.start()
    try:
        assert ours.poll(20)
        publication = ours.recv()
        assert set(os.listdir("/dev/shm")) <= before
        with reading(publication.head, publication.stamp):
            held = mapped(publication.paths[0], publication.sizes[0])
            process.kill()
            process.join(10)
            assert checksum_of("w", "int64", (1 << 20,), held) == publication.tensors[0].checksum
    finally:
        process.kill()
        process.join(10)
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(SlotGone, match="is gone with its owner"), reading(publication.head, publication.stamp):
        pass
    with pytest.raises(SlotGone, match="is gone with its owner"):
        mapped(publication.paths[0], publication.sizes[0])
    assert set(os.listdir("/dev/shm")) <= before


def test_memory_goes_with_its_publisher() -> None:
    publisher = Publisher()
    publication = publisher.publish(TENSORS.items(), 1)
    inode = identity(publication.head)
    del publisher
    gc.collect()
    assert inode not in {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in os.listdir("/proc/self/fd") if _is_open(fd)}


def _is_open(fd: str) -> bool:
    try:
        os.fstat(int(fd))
    except OSError:
        return False
    return True
