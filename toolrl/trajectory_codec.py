"""Trajectories as bytes and back: compact, lossless, and loud about damage.

Layout: `TRJ`, one byte of format version, four bytes of CRC-32 (little-endian) over the body, the body in MessagePack.

- Integers (token ids, weight versions) are arrays of the narrowest unsigned type that holds them; a constant run is one
  pair.
- Log-probabilities are float32 when every value survives the round trip bit for bit, float64 otherwise.
- Free-form values (call arguments, metadata) are whatever JSON can hold; integers of any size and lone surrogates,
  which a model can write into its JSON, survive too. Tuples come back as lists.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np

from toolrl.trajectory import CallError, Outcome, ToolCall, ToolResult, Trajectory, Turn

MAGIC = b"TRJ"
VERSION = 1
_HEADER_BYTES = len(MAGIC) + 1 + 4
_CONSTANT = 0
_WIDTHS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<i8"}
_EXT_INT, _EXT_TEXT, _EXT_MAP = 1, 2, 3


class CorruptTrajectory(ValueError):
    """The bytes are not a trajectory, or were damaged, or are of a version that this code does not read."""


def encode(trajectory: Trajectory) -> bytes:
    """The trajectory as bytes.

    Raises:
        TypeError: metadata or a call's arguments hold something that JSON cannot; the message names the trajectory.
    """
    body = _trajectory_to_list(trajectory)
    try:
        try:
            packed = msgspec.msgpack.encode(body)
        except (OverflowError, UnicodeEncodeError):  # rare, so the common case pays nothing for it
            packed = msgspec.msgpack.encode(_escape(body))
    except TypeError as error:
        raise TypeError(
            f"trajectory {trajectory.id}: {error}; metadata and call arguments may hold only what JSON can"
        ) from error
    return MAGIC + bytes([VERSION]) + zlib.crc32(packed).to_bytes(4, "little") + packed


def decode(data: bytes) -> Trajectory:
    """The trajectory that `encode` was given.

    Raises:
        CorruptTrajectory: wrong magic, unknown version, wrong checksum, or a body of another shape.
    """
    if len(data) < _HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        raise CorruptTrajectory(f"{len(data)} bytes that start with {bytes(data[:4])!r} are not an encoded trajectory")
    version = data[len(MAGIC)]
    if version != VERSION:
        raise CorruptTrajectory(f"trajectory format {version} is not readable here; this code reads format {VERSION}")
    body = memoryview(data)[_HEADER_BYTES:]
    expected, found = int.from_bytes(data[4:_HEADER_BYTES], "little"), zlib.crc32(body)
    if expected != found:
        raise CorruptTrajectory(
            f"checksum of {len(data)} bytes is {found:08x}, not {expected:08x}: damaged or cut short; drop the file"
        )
    try:
        return _trajectory_from_list(msgspec.msgpack.decode(body, ext_hook=_unescape))
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, IndexError) as error:
        raise CorruptTrajectory(
            f"checksum holds but the body is not a trajectory of format {VERSION}: {error}"
        ) from error


def _trajectory_to_list(t: Trajectory) -> list[Any]:
    return [
        t.id,
        t.group_id,
        t.task_id,
        t.sample_index,
        _pack_ints(t.prompt_ids),
        [_turn_to_list(turn) for turn in t.turns],
        None if t.outcome is None else t.outcome.value,
        t.limit,
        t.answer,
        t.rewards,
        t.temperature,
        t.timings,
        t.metadata,
    ]


def _trajectory_from_list(body: list[Any]) -> Trajectory:
    (
        id_,
        group_id,
        task_id,
        sample_index,
        prompt,
        turns,
        outcome,
        limit,
        answer,
        rewards,
        temperature,
        timings,
        extra,
    ) = body
    return Trajectory(
        id=id_,
        group_id=group_id,
        task_id=task_id,
        sample_index=sample_index,
        prompt_ids=_unpack_ints(prompt),
        turns=[_turn_from_list(turn) for turn in turns],
        outcome=None if outcome is None else Outcome(outcome),
        limit=limit,
        answer=answer,
        rewards=rewards,
        temperature=temperature,
        timings=timings,
        metadata=extra,
    )


def _turn_to_list(turn: Turn) -> list[Any]:
    return [
        turn.kind,
        _pack_ints(turn.token_ids),
        _pack_floats(turn.logprobs),
        _pack_ints(turn.weight_versions),
        turn.finish_reason,
        turn.text,
        [[call.id, call.name, call.arguments] for call in turn.calls],
        [[error.kind, error.message] for error in turn.call_errors],
        turn.rewards,
        [_result_to_list(result) for result in turn.results],
        turn.fresh_context,
    ]


def _result_to_list(result: ToolResult) -> list[Any]:
    times = (result.wall_s, result.queue_s, result.cpu_s)
    shown = (result.call_id, result.name, result.status, result.text, result.truncated)
    return [*shown, *times, result.output_bytes, result.injected]


def _turn_from_list(body: list[Any]) -> Turn:
    kind, tokens, logprobs, versions, finish_reason, text, calls, errors, rewards, results, fresh = body
    return Turn(
        kind=kind,
        token_ids=_unpack_ints(tokens),
        logprobs=_unpack_floats(logprobs),
        weight_versions=_unpack_ints(versions),
        finish_reason=finish_reason,
        text=text,
        calls=[ToolCall(*call) for call in calls],
        call_errors=[CallError(*error) for error in errors],
        rewards=rewards,
        results=[ToolResult(*result) for result in results],
        fresh_context=fresh,
    )


def _pack_ints(values: Sequence[int]) -> list[Any]:
    """[width, bytes], or [0, value, count] for a constant run."""
    if not values:
        return [_CONSTANT, 0, 0]
    low, high = min(values), max(values)
    if low == high:
        return [_CONSTANT, int(low), len(values)]
    width = next((w for w in (1, 2, 4) if low >= 0 and high < 1 << (8 * w)), 8)
    return [width, np.asarray(values, dtype=_WIDTHS[width]).tobytes()]


def _unpack_ints(packed: list[Any]) -> list[int]:
    if packed[0] == _CONSTANT:
        return [packed[1]] * cast(int, packed[2])
    return cast("list[int]", np.frombuffer(packed[1], dtype=_WIDTHS[packed[0]]).tolist())


def _pack_floats(values: Sequence[float]) -> list[Any]:
    wide = np.asarray(values, dtype="<f8")
    with np.errstate(over="ignore"):
        narrow = wide.astype("<f4")
    exact = narrow.astype("<f8").tobytes() == wide.tobytes()
    return [4, narrow.tobytes()] if exact else [8, wide.tobytes()]


def _unpack_floats(packed: list[Any]) -> list[float]:
    return cast("list[float]", np.frombuffer(packed[1], dtype=f"<f{packed[0]}").astype("<f8").tolist())


def _escape(value: Any) -> Any:
    """The same value with what MessagePack cannot hold wrapped in extensions."""
    if isinstance(value, str):
        return value if _is_utf8(value) else msgspec.msgpack.Ext(_EXT_TEXT, value.encode("utf-8", "surrogatepass"))
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 64:
        return msgspec.msgpack.Ext(_EXT_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if isinstance(value, list | tuple):
        return [_escape(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and _is_utf8(key) for key in value):
            return {key: _escape(item) for key, item in value.items()}
        pairs = [[_escape(key), _escape(item)] for key, item in value.items()]
        return msgspec.msgpack.Ext(_EXT_MAP, msgspec.msgpack.encode(pairs))
    return value


def _unescape(code: int, data: memoryview) -> Any:
    if code == _EXT_INT:
        return int.from_bytes(data, "little", signed=True)
    if code == _EXT_TEXT:
        return bytes(data).decode("utf-8", "surrogatepass")
    if code == _EXT_MAP:
        return dict(msgspec.msgpack.decode(data, ext_hook=_unescape))
    raise ValueError(f"unknown extension {code}")


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
