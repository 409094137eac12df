"""How tensors are cut into buckets of a fixed size, and put together again: the same on both sides, from the sizes alone.

Invariants:
- Neither side holds more than a few buckets beside the weights; a tensor that is larger than a bucket travels in pieces.
- A bucket ends with the checksum of its version, number and content; 16 zeros stand for none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from actors.weights.publication import ALIGNMENT, TensorRecord

DIGEST_BYTES = 16


class BucketDamaged(ValueError):
    """What arrived is not what was sent."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `stop` of one tensor, at `offset` of a bucket."""

    tensor: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What travels in one message."""

    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Of the content, without the checksum."""
        return max(piece.offset + piece.stop - piece.start for piece in self.pieces)


def cut(sizes: Sequence[int], bucket_bytes: int) -> list[Bucket]:
    """Buckets of at most `bucket_bytes` for tensors of these sizes, in order. A tensor that fits into a bucket is not divided."""
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    used = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if pieces and used + min(size - start, bucket_bytes) > bucket_bytes:
                buckets.append(Bucket(tuple(pieces)))
                pieces, used = [], 0
            stop = min(size, start + bucket_bytes)
            pieces.append(Piece(index, start, stop, used))
            used += -(-(stop - start) // ALIGNMENT) * ALIGNMENT
            start = stop
    if pieces:
        buckets.append(Bucket(tuple(pieces)))
    return buckets


def filled(
    buckets: Sequence[Bucket],
    tensors: Iterable[tuple[str, torch.Tensor]],
    records: Sequence[TensorRecord],
    memory: Sequence[torch.Tensor],
    *,
    version: int,
    checksum: bool,
) -> Iterator[torch.Tensor]:
    """[bytes + DIGEST_BYTES] for each bucket, in `memory`'s buffers by turns: the one before the last is overwritten.

    Raises:
        ValueError: the tensors are not those of `records`.
    """
    content = _contents(tensors, records)
    current, flat = -1, torch.empty(0, dtype=torch.uint8)
    for number, bucket in enumerate(buckets):
        buffer, end = memory[number % len(memory)], bucket.nbytes
        for piece in bucket.pieces:
            while current < piece.tensor:  # those without a byte are in no bucket
                current, flat = next(content)
            buffer[piece.offset : piece.offset + piece.stop - piece.start].copy_(flat[piece.start : piece.stop])
        digest = _digest(version, number, buffer[:end]) if checksum else bytes(DIGEST_BYTES)
        buffer[end : end + DIGEST_BYTES] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        yield buffer[: end + DIGEST_BYTES]
    for _ in content:
        pass


def _contents(
    tensors: Iterable[tuple[str, torch.Tensor]], records: Sequence[TensorRecord]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Each tensor's bytes, with its number."""
    count = 0
    for count, (name, tensor) in enumerate(tensors, start=1):
        record = records[count - 1] if count <= len(records) else None
        label = str(tensor.dtype).removeprefix("torch.")
        if record is None or (name, label, tuple(tensor.shape)) != (record.name, record.dtype, record.shape):
            raise ValueError(
                f"the weight source yields {name} {label} {list(tensor.shape)}, and had announced {record}"
            )
        yield count - 1, tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if count < len(records):
        raise ValueError(f"the weight source yielded {count} tensors, and had announced {len(records)}")


def put_together(
    buckets: Sequence[Bucket],
    records: Sequence[TensorRecord],
    arriving: Iterable[torch.Tensor],
    *,
    version: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as their buckets arrive, [bytes + DIGEST_BYTES] each; one that came whole is a view into its bucket.

    Raises:
        BucketDamaged: a checksum is wrong; what came before it was as sent.
    """
    parts: dict[int, torch.Tensor] = {}
    done = 0
    for number, (bucket, buffer) in enumerate(zip(buckets, arriving, strict=True)):
        content, digest = buffer[: bucket.nbytes], bytes(buffer[bucket.nbytes :].numpy())
        if any(digest) and digest != (found := _digest(version, number, content)):
            name = records[bucket.pieces[0].tensor].name
            raise BucketDamaged(
                f"checksum of bucket {number} (from {name}) is {found.hex()}, the learner's is {digest.hex()}"
            )
        for piece in bucket.pieces:
            while done < piece.tensor:
                if not records[done].nbytes:
                    yield _shaped(records[done], torch.empty(0, dtype=torch.uint8))
                done += 1
            record = records[piece.tensor]
            taken = content[piece.offset : piece.offset + piece.stop - piece.start]
            if piece.stop - piece.start < record.nbytes:
                whole = parts.setdefault(piece.tensor, torch.empty(record.nbytes, dtype=torch.uint8))
                whole[piece.start : piece.stop].copy_(taken)
                if piece.stop < record.nbytes:
                    continue
                taken = parts.pop(piece.tensor)
            yield _shaped(record, taken)
            done = piece.tensor + 1
    for record in records[done:]:
        yield _shaped(record, torch.empty(0, dtype=torch.uint8))


def described(metadata: Iterable[object]) -> list[TensorRecord]:
    """Records, without a place, of what a weight source announces."""
    records = []
    for meta in metadata:
        dtype, shape = meta.dtype, tuple(meta.shape)  # type: ignore[attr-defined]
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        records.append(TensorRecord(meta.name, str(dtype).removeprefix("torch."), shape, 0, 0, nbytes, ""))  # type: ignore[attr-defined]
    return records


def receiving(
    buckets: Sequence[Bucket], receive: Callable[[torch.Tensor], Callable[[], None]]
) -> Iterator[torch.Tensor]:
    """New memory for each bucket, filled by `receive`, which begins and returns what waits for the end. One ahead."""
    waiting: list[tuple[torch.Tensor, Callable[[], None]]] = []
    for bucket in buckets:
        buffer = torch.empty(bucket.nbytes + DIGEST_BYTES, dtype=torch.uint8)
        waiting.append((buffer, receive(buffer)))
        if len(waiting) > 1:
            yield _arrived(*waiting.pop(0))
    while waiting:
        yield _arrived(*waiting.pop(0))


def _arrived(buffer: torch.Tensor, wait: Callable[[], None]) -> torch.Tensor:
    wait()
    return buffer


def _shaped(record: TensorRecord, content: torch.Tensor) -> tuple[str, torch.Tensor]:
    return record.name, content.view(getattr(torch, record.dtype)).view(record.shape)


def _digest(version: int, number: int, content: torch.Tensor) -> bytes:
    digest = xxhash.xxh3_128(f"{version}|{number}|".encode())
    digest.update(content.numpy())
    return digest.digest()
