"""Tensors cut into buckets and put together again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.weights.buckets import DIGEST_BYTES, BucketDamaged, cut, described, filled, put_together
from actors.weights.publication import ALIGNMENT
from learner.weight_source import ParameterMeta

Tensors = list[tuple[str, torch.Tensor]]


def made(lengths: list[int]) -> Tensors:
    kinds = (torch.float32, torch.bfloat16, torch.uint8)
    return [
        (f"w{n}", (torch.arange(length) + 7 * n).to(kinds[n % 3]).reshape(-1, 1)) for n, length in enumerate(lengths)
    ]


def announced(tensors: Tensors) -> list[ParameterMeta]:
    return [ParameterMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]


def messages(tensors: Tensors, bucket_bytes: int, *, checksum: bool = True) -> Iterator[torch.Tensor]:
    """As they travel: copies, since the sender fills its memory again."""
    records = described(announced(tensors))
    buckets = cut([record.nbytes for record in records], bucket_bytes)
    memory = [torch.empty(max(b.nbytes for b in buckets) + DIGEST_BYTES, dtype=torch.uint8) for _ in range(2)]
    for each in filled(buckets, tensors, records, memory, version=3, checksum=checksum):
        yield each.clone()


def received(
    tensors: Tensors, arriving: Iterator[torch.Tensor], bucket_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    records = described(announced(tensors))
    return put_together(cut([record.nbytes for record in records], bucket_bytes), records, arriving, version=3)


@given(lengths=st.lists(st.integers(0, 200), min_size=1, max_size=12), bucket=st.integers(1, 6))
@settings(deadline=None, max_examples=60)
def test_what_arrives_is_what_was_sent(lengths: list[int], bucket: int) -> None:
    tensors, bucket_bytes = made([*lengths, 1]), bucket * ALIGNMENT
    arrived = list(received(tensors, messages(tensors, bucket_bytes), bucket_bytes))
    assert [name for name, _ in arrived] == [name for name, _ in tensors]
    for (_, got), (_, sent) in zip(arrived, tensors, strict=True):
        assert got.dtype == sent.dtype and torch.equal(got, sent)
    assert all(len(each) <= bucket_bytes + DIGEST_BYTES for each in messages(tensors, bucket_bytes))


def test_a_damaged_bucket_is_noticed_before_its_tensors_are_given() -> None:
    tensors = made([100, 100, 100])

    def damaged() -> Iterator[torch.Tensor]:
        for number, each in enumerate(messages(tensors, 512)):
            if number == 1:
                each[5] ^= 1
            yield each

    arriving = received(tensors, damaged(), 512)
    assert next(arriving)[0] == "w0"
    with pytest.raises(BucketDamaged, match=r"bucket 1 \(from w1\)"):
        next(arriving)


def test_a_bucket_of_another_version_or_place_is_noticed() -> None:
    tensors = made([128, 256])  # 512 bytes each
    first, second = messages(tensors, 512)
    with pytest.raises(BucketDamaged):
        list(received(tensors, iter([second, first]), 512))


def test_without_checksums_nothing_is_compared() -> None:
    tensors = made([50])
    (only,) = messages(tensors, 512, checksum=False)
    only[0] ^= 1
    ((_, got),) = received(tensors, iter([only]), 512)
    assert not torch.equal(got, tensors[0][1])


@pytest.mark.parametrize("given", [0, 1, 3])
def test_a_source_that_yields_something_else_than_announced_is_an_error(given: int) -> None:
    tensors = made([10, 10])
    records = described(announced(tensors))
    memory = [torch.empty(4096, dtype=torch.uint8) for _ in range(2)]
    source = made([10, 10, 10])[:given]
    with pytest.raises(ValueError, match="weight source yield"):
        list(filled(cut([40, 20], 64), source, records, memory, version=1, checksum=True))
