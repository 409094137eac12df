"""Length-prefixed frames, the one language between the host and a box.

A frame is two big-endian u32 (header length, body length), a JSON object and raw bytes; the object's `parts` says how
the body splits. Both sides decode with `FrameDecoder`, which is total: any bytes give frames or a `FrameError`, and
no length that a peer claims is believed beyond the caps.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 65536
MAX_BODY_BYTES = 64 * 2**20
_PREFIX = struct.Struct(">II")
# Bound once: a call of `json.dumps` with separators makes a new encoder each time.
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_from_json = json.JSONDecoder().decode


class FrameError(Exception):
    """Bytes that are no frame; the stream cannot be trusted any more."""


class Frame(NamedTuple):
    """One message: a JSON object and the raw parts that go with it."""

    header: dict[str, Any]
    parts: list[bytes]


def encode(header: dict[str, Any], *parts: bytes) -> bytes:
    """The bytes of one frame."""
    head = _to_json({**header, "parts": [len(part) for part in parts]}).encode()
    body = b"".join(parts)
    if len(head) > MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES:
        raise FrameError(f"frame too large: header {len(head)} bytes, body {len(body)} bytes")
    return _PREFIX.pack(len(head), len(body)) + head + body


def _split(head: bytes, body: bytes) -> Frame:
    try:
        header = _from_json(head.decode())
    except (ValueError, RecursionError) as error:
        raise FrameError(f"header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise FrameError("header is not an object")
    lengths = header.pop("parts", None)
    if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
        raise FrameError("`parts` is not a list of lengths")
    if sum(lengths) != len(body):
        raise FrameError(f"`parts` sum to {sum(lengths)} bytes, the body has {len(body)}")
    parts, start = [], 0
    for length in lengths:
        parts.append(body[start : start + length])
        start += length
    return Frame(header, parts)


class FrameDecoder:
    """Turns a byte stream, cut anywhere, into frames."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises FrameError; the decoder is then of no more use."""
        self._buffer += data
        frames = []
        while len(self._buffer) >= _PREFIX.size:
            head_bytes, body_bytes = _PREFIX.unpack_from(self._buffer)
            if head_bytes > MAX_HEADER_BYTES or body_bytes > self._max_body_bytes:
                raise FrameError(f"frame claims a header of {head_bytes} and a body of {body_bytes} bytes")
            end = _PREFIX.size + head_bytes + body_bytes
            if len(self._buffer) < end:
                break
            frame = bytes(self._buffer[_PREFIX.size : end])
            del self._buffer[:end]
            frames.append(_split(frame[:head_bytes], frame[head_bytes:]))
        return frames
