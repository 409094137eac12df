"""Packing, checksums and shared memory: what the learner sends is what an engine may load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.weights.publication import ALIGNMENT, EmptyPublication, Publication, TensorRecord, checksum_of, pack
from actors.weights.shared_memory import NoSharedMemory, mapped, remove_orphans, staged

TENSORS = {
    "embed": torch.arange(700, dtype=torch.float32).reshape(70, 10),
    "norm": torch.linspace(-1, 1, 5, dtype=torch.bfloat16),
    "scale": torch.tensor(0.5),
    "big": torch.randn(64, 32, generator=torch.Generator().manual_seed(0)),
    "ids": torch.arange(9, dtype=torch.int64),
    "transposed": torch.arange(12.0).reshape(3, 4).T,
}


def unpack(bucket: np.ndarray, record: TensorRecord) -> torch.Tensor:
    content = torch.from_numpy(bucket[record.offset : record.offset + record.nbytes].copy())
    return content.view(getattr(torch, record.dtype)).view(record.shape)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 3000, 1 << 20])
def test_buckets_give_the_tensors_back(bucket_bytes: int) -> None:
    buckets, records = [], []
    for bucket, some in pack(TENSORS.items(), bucket_bytes=bucket_bytes):
        assert {record.bucket for record in some} == {len(buckets)}
        assert len(some) == 1 or bucket.nbytes <= bucket_bytes
        buckets.append(bucket)
        records += some
    assert [record.name for record in records] == list(TENSORS)
    for record in records:
        assert record.offset % ALIGNMENT == 0
        assert torch.equal(unpack(buckets[record.bucket], record), TENSORS[record.name])


def test_floating_point_tensors_are_converted_and_checksummed_as_sent() -> None:
    ((bucket, records),) = pack(TENSORS.items(), dtype=torch.bfloat16)
    by_name = {record.name: record for record in records}
    assert by_name["ids"].dtype == "int64"
    big = by_name["big"]
    assert torch.equal(unpack(bucket, big), TENSORS["big"].to(torch.bfloat16))
    assert big.checksum == checksum_of("big", "bfloat16", (64, 32), bucket[big.offset : big.offset + big.nbytes])


def checksum(name: str, tensor: torch.Tensor) -> str:
    ((_, (record,)),) = pack([(name, tensor)])
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
    def whole(tensors: dict[str, torch.Tensor], **options: bool) -> str:
        ((bucket, records),) = pack(tensors.items(), **options)
        return Publication(1, tuple(records), (bucket,)).checksum

    assert whole(TENSORS) == whole(dict(TENSORS))
    assert whole(TENSORS) != whole(TENSORS | {"scale": torch.tensor(0.25)})
    assert whole(TENSORS, checksum=False) == ""


def test_an_empty_or_ambiguous_source_is_refused() -> None:
    with pytest.raises(EmptyPublication, match="no tensor"):
        list(pack([]))
    with pytest.raises(EmptyPublication, match="norm twice"):
        list(pack([("norm", TENSORS["norm"]), ("norm", TENSORS["norm"])]))


def test_records_survive_the_message_to_vllm() -> None:
    ((_, records),) = pack(TENSORS.items())
    assert [TensorRecord.from_fields(record.fields()) for record in records] == records


def test_staged_files_hold_the_buckets_and_go_away(tmp_path: Path) -> None:
    buckets = [bucket for bucket, _ in pack(TENSORS.items(), bucket_bytes=3000)]
    with staged(buckets, tmp_path) as paths:
        assert [mapped(path).numpy().tobytes() for path in paths] == [bucket.tobytes() for bucket in buckets]
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
        held = mapped(paths[0])
    assert list(tmp_path.iterdir()) == []
    assert held.numpy().tobytes() == buckets[0].tobytes()  # a mapping outlives its file's name


def test_files_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    dead = tmp_path / "toolrl-weights-4194305-0a-0"  # beyond the largest process id
    alive = tmp_path / "toolrl-weights-1-0a-0"
    foreign = tmp_path / "toolrl-weights-notes.txt"
    for file in (dead, alive, foreign):
        file.write_bytes(b"x")
    remove_orphans(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive, foreign])


def test_too_little_shared_memory_is_said_with_the_remedy() -> None:
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), shape=(1 << 50,), strides=(0,))
    with pytest.raises(NoSharedMemory, match="MiB are free there: make it larger"), staged([huge]):
        pass
