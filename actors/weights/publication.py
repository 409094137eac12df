"""One version of the weights as bytes: flat buckets, and for every tensor its place and its checksum.

Invariants:
- A tensor's bytes lie in one bucket, contiguous, at an offset that is a multiple of `ALIGNMENT`; the same source gives
  the same layout and the same checksums.
- A checksum covers name, dtype, shape and bytes, and is computed from the bytes that are sent, on the learner's side.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

ALIGNMENT = 64
BUCKET_BYTES = 256 << 20


class EmptyPublication(ValueError):
    """A weight source yielded no tensor, or one name twice."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where one tensor lies, under its Hugging Face name."""

    name: str
    dtype: str  # torch's name without the module: "float32", "bfloat16"
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int
    checksum: str  # empty: not computed

    def fields(self) -> list[Any]:
        """For a message to vLLM's processes; `from_fields` is the inverse."""
        return [self.name, self.dtype, list(self.shape), self.bucket, self.offset, self.nbytes, self.checksum]

    @classmethod
    def from_fields(cls, fields: list[Any]) -> TensorRecord:
        name, dtype, shape, *place = fields
        return cls(name, dtype, tuple(shape), *place)


@dataclass(frozen=True)
class Publication:
    """A version of the weights, as it travels from the learner to the engines.

    `buckets` holds Ray object references (or, inside one process, arrays of bytes), in order.
    """

    version: int
    tensors: tuple[TensorRecord, ...]
    buckets: tuple[Any, ...]

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.tensors)

    @functools.cached_property
    def checksum(self) -> str:
        """One checksum for all tensors; empty when they have none."""
        if not all(record.checksum for record in self.tensors):
            return ""
        return xxhash.xxh3_128_hexdigest("\n".join(f"{r.name} {r.checksum}" for r in self.tensors).encode())


def checksum_of(name: str, dtype: str, shape: Iterable[int], content: np.ndarray) -> str:
    """Of one tensor. Guards against damage and mix-ups, not against forgery."""
    digest = xxhash.xxh3_128(f"{name}|{dtype}|{','.join(map(str, shape))}|".encode())
    digest.update(content)  # type: ignore[arg-type]
    return digest.hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    """[nbytes] uint8, on the CPU; a view where the tensor already lies there contiguously."""
    content: np.ndarray = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    return content


def pack(
    source: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype | None = None,
    checksum: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[np.ndarray, list[TensorRecord]]]:
    """Buckets one after the other, each with its records, so that no more than one is held besides the source's own
    tensors.

    `dtype` converts floating-point tensors to what the engines compute in. A tensor larger than a bucket gets one of
    its own.

    Raises:
        EmptyPublication: see the class.
    """
    seen: set[str] = set()
    waiting: list[tuple[str, torch.Tensor]] = []
    size = index = 0
    for name, tensor in source:
        if name in seen:
            raise EmptyPublication(f"the weight source yielded {name} twice")
        seen.add(name)
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        room = _aligned(tensor.numel() * tensor.element_size())
        if waiting and size + room > bucket_bytes:
            yield _fill(waiting, size, index, checksum)
            waiting, size, index = [], 0, index + 1
        waiting.append((name, tensor))
        size += room
    if not seen:
        raise EmptyPublication("the weight source yielded no tensor")
    yield _fill(waiting, size, index, checksum)


def _fill(
    tensors: list[tuple[str, torch.Tensor]], size: int, index: int, checksum: bool
) -> tuple[np.ndarray, list[TensorRecord]]:
    bucket = np.empty(size, dtype=np.uint8)
    records, offset = [], 0
    for name, tensor in tensors:
        content = tensor_bytes(tensor)
        place = bucket[offset : offset + content.nbytes]
        place[:] = content
        kind, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        digest = checksum_of(name, kind, shape, place) if checksum else ""
        records.append(TensorRecord(name, kind, shape, index, offset, content.nbytes, digest))
        offset += _aligned(content.nbytes)
    return bucket, records


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def publish(
    source: Iterable[tuple[str, torch.Tensor]],
    version: int,
    *,
    dtype: torch.dtype | None = None,
    checksum: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
) -> Publication:
    """Puts the weights into Ray's object store, once for all engines. Call it in the learner rank that holds them
    whole.

    With sharded weights every rank must run through its own `source` (gathering is collective); the others just
    exhaust it.
    """
    import ray

    tensors: list[TensorRecord] = []
    buckets = []
    for bucket, records in pack(source, dtype=dtype, checksum=checksum, bucket_bytes=bucket_bytes):
        buckets.append(ray.put(bucket))
        tensors.extend(records)
    return Publication(version, tuple(tensors), tuple(buckets))
