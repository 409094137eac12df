"""The learner's end: writes a version of the weights into shared memory, in one pass over the bytes.

Invariants:
- What is sent is what was hashed: a piece is copied, converted on the way where the engines want another dtype, and its
  checksum goes on over the copy while that is still in the processor's cache.
- A publication can be read until the one after the next is written, and longer by those who have begun to read it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from actors.weights.publication import ALIGNMENT, Checksum, Publication, TensorRecord, this_node
from actors.weights.shared_memory import Slot, Slots

BUCKET_BYTES = 256 << 20
PIECE_BYTES = 1 << 20  # copied, then hashed: fits into the cache of a core


class EmptyPublication(ValueError):
    """A weight source yielded no tensor, or one name twice."""


class Publisher:
    """Lives in the learner rank that holds the weights whole; its publications live no longer than it."""

    def __init__(self, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._slots = Slots()

    def forget(self) -> None:
        """Gives the memory back, once those who read it have ended: what was published is lost to all others."""
        self._slots = Slots()

    def publish(
        self,
        source: Iterable[tuple[str, torch.Tensor]],
        version: int,
        *,
        dtype: torch.dtype | None = None,
        checksum: bool = True,
    ) -> Publication:
        """Writes the weights once, for all engines. `dtype` converts floating-point tensors to what the engines compute in.

        With sharded weights every rank must run through its own `source` (gathering is collective); the others just
        exhaust it.

        Raises:
            EmptyPublication, NoSharedMemory: see the classes; the publication before stays readable.
        """
        with self._slots.writing() as (slot, stamp):
            records = self._fill(slot, source, dtype, checksum)
        paths = tuple(bucket.path for bucket in slot.buckets[: 1 + records[-1].bucket])
        return Publication(version, tuple(records), this_node(), slot.head.path, paths, stamp)

    def _fill(
        self, slot: Slot, source: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, checksum: bool
    ) -> list[TensorRecord]:
        """A tensor that is larger than a bucket gets one of its own."""
        records: list[TensorRecord] = []
        seen: set[str] = set()
        index = offset = 0
        for name, tensor in source:
            if name in seen:
                raise EmptyPublication(f"the weight source yielded {name} twice")
            seen.add(name)
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            nbytes = tensor.numel() * kind.itemsize
            if offset and offset + nbytes > self.bucket_bytes:
                index, offset = index + 1, 0
            place = slot.bucket(index, max(self.bucket_bytes, nbytes)).room(offset, nbytes)
            label, shape = str(kind).removeprefix("torch."), tuple(tensor.shape)
            digest = write(tensor, kind, place, Checksum(name, label, shape) if checksum else None)
            records.append(TensorRecord(name, label, shape, index, offset, nbytes, digest))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if not records:
            raise EmptyPublication("the weight source yielded no tensor")
        return records


def write(tensor: torch.Tensor, kind: torch.dtype, place: np.ndarray, checksum: Checksum | None) -> str:
    """Copies `tensor` to `place` [nbytes] as `kind`, and returns the checksum of what lies there then."""
    if not place.nbytes:
        return checksum.hex() if checksum is not None else ""
    tensor = tensor.detach()
    target = torch.from_numpy(place)
    if tensor.device.type == "cpu" and tensor.dtype == kind and tensor.is_contiguous():
        origin, piece_bytes = tensor.reshape(-1).view(torch.uint8), PIECE_BYTES
    else:
        target.view(kind).view(tensor.shape).copy_(tensor)
        origin, piece_bytes = target, place.nbytes
    for start in range(0, place.nbytes, piece_bytes):
        piece = slice(start, start + piece_bytes)
        if origin is not target:
            target[piece].copy_(origin[piece])
        if checksum is not None:
            checksum.update(place[piece])
    return checksum.hex() if checksum is not None else ""
