"""One version of the weights, as it travels: where every tensor lies, and its checksum.

Invariants:
- A tensor's bytes lie in one bucket, contiguous, at an offset that is a multiple of `ALIGNMENT`; the same source gives
  the same layout and the same checksums.
- A checksum covers name, dtype, shape and bytes, and is computed from the bytes that are sent, on the learner's side.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

ALIGNMENT = 64


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
    """A version of the weights in the learner's memory: what engines are told of it. The bytes stay where they are."""

    version: int
    tensors: tuple[TensorRecord, ...]
    node: str = ""  # Ray's id of the host where they lie; empty: without Ray
    head: str = ""  # of the slot, see `actors.weights.shared_memory`
    paths: tuple[str, ...] = ()  # its buckets, in order
    stamp: bytes = b""
    adapter: Mapping[str, Any] | None = None  # peft's settings of the adapter that the tensors are; None: all weights
    merged_nbytes: int = 0  # of all weights; 0: not counted
    gather_s: float = 0.0  # the learner's ranks, making whole tensors
    write_s: float = 0.0  # its first rank, writing them
    in_memory: bool = True  # False: engines have got it over a group, and it lies nowhere
    nbytes_sent: int = 0  # over the group

    @functools.cached_property
    def nbytes(self) -> int:
        return self.nbytes_sent or sum(record.nbytes for record in self.tensors)

    @property
    def share(self) -> float:
        """Bytes to those of all weights."""
        return self.nbytes / self.merged_nbytes if self.merged_nbytes else 1.0

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Used bytes of each bucket."""
        return bucket_sizes(self.tensors)

    @functools.cached_property
    def checksum(self) -> str:
        """One checksum for all tensors; empty when they have none."""
        if not all(record.checksum for record in self.tensors):
            return ""
        return xxhash.xxh3_128_hexdigest("\n".join(f"{r.name} {r.checksum}" for r in self.tensors).encode())


def bucket_sizes(tensors: Sequence[TensorRecord]) -> tuple[int, ...]:
    """Bytes that the records take of each bucket."""
    sizes = [0] * (1 + max((record.bucket for record in tensors), default=-1))
    for record in tensors:
        sizes[record.bucket] = max(sizes[record.bucket], record.offset + record.nbytes)
    return tuple(sizes)


class Checksum:
    """Of one tensor, in pieces. Guards against damage and mix-ups, not against forgery."""

    def __init__(self, name: str, dtype: str, shape: Iterable[int]) -> None:
        self._digest = xxhash.xxh3_128(f"{name}|{dtype}|{','.join(map(str, shape))}|".encode())

    def update(self, content: np.ndarray) -> None:
        self._digest.update(content)  # type: ignore[arg-type]

    def hex(self) -> str:
        return self._digest.hexdigest()


def checksum_of(name: str, dtype: str, shape: Iterable[int], content: np.ndarray) -> str:
    """Of one tensor, at once."""
    checksum = Checksum(name, dtype, shape)
    checksum.update(content)
    return checksum.hex()


def this_node() -> str:
    """Ray's id of the host that this process runs on; empty without Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().get_node_id())


def this_host() -> str:
    """The address at which other hosts of the cluster reach this one; loopback without Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())
