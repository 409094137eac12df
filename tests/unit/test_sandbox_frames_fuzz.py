"""Both ends of the stream under arbitrary bytes: the host's channel, what it makes of an answer, and the box's reader."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.channel import Channel, ChannelClosed, DockerChannel
from sandbox.inside.frames import FrameDecoder, FrameError, encode
from sandbox.inside.service import EXIT_BAD_STREAM, EXIT_SILENT, EXIT_STREAM_ENDED, HostStream
from sandbox.result import STATUSES, RunResult, from_frame

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
honest_frames = st.builds(
    lambda header, parts: encode({key: value for key, value in header.items() if key != "parts"}, *parts),
    st.dictionaries(st.sampled_from(["id", "status", "note", "clean", "x"]), json_values, max_size=4),
    st.lists(st.binary(max_size=30), max_size=4),
)
claimed_frames = st.builds(  # right prefix, any header
    lambda head, body: struct.pack(">II", len(head), len(body)) + head + body,
    st.one_of(st.binary(max_size=40), json_values.map(lambda value: json.dumps(value).encode())),
    st.binary(max_size=40),
)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Honest frames, frames with any header and noise, some bytes of it flipped, cut anywhere."""
    parts = draw(st.lists(st.one_of(honest_frames, claimed_frames, st.binary(max_size=40)), max_size=5))
    stream = bytearray(b"".join(parts))
    for _ in range(draw(st.integers(0, 3)) if stream else 0):
        stream[draw(st.integers(0, len(stream) - 1))] = draw(st.integers(0, 255))
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    return [bytes(stream[start:end]) for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


class Wire(asyncio.Transport):
    """The far end of a channel; keeps what was sent and whether it was cut."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.channel, self.cut = channel, False

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        if not self.cut:
            self.cut = True
            self.channel.connection_lost(None)

    def is_closing(self) -> bool:
        return self.cut


def decoded(pieces: list[bytes]) -> tuple[list, bool]:
    """(frames before the first bad byte, whether there is one), by the decoder alone."""
    decoder, frames = FrameDecoder(), []
    for piece in pieces:
        try:
            frames += decoder.feed(piece)
        except FrameError:
            return frames, True
    return frames, False


@given(streams())
@settings(max_examples=100, deadline=None)
def test_the_host_s_channel_takes_any_bytes_and_leaves_nobody_waiting(pieces):
    async def feed() -> None:
        channel = Channel()
        wire = Wire(channel)
        channel.connection_made(wire)
        request = asyncio.ensure_future(channel.request({"op": "run"}, deadline_s=30))
        await asyncio.sleep(0)
        for piece in pieces:
            if not wire.cut:
                channel.data_received(piece)
        bad = decoded(pieces)[1]
        assert wire.cut == bad
        channel.close()  # the stream ends: the request has an answer or an error, not a wait
        await asyncio.wait([request], timeout=5)
        assert request.done()
        if request.exception() is None:
            assert request.result().header["id"] == 1
        else:
            assert isinstance(request.exception(), ChannelClosed)

    asyncio.run(feed())


@given(
    streams(),
    st.sampled_from([b"HTTP/1.1 101 UPGRADED\r\n\r\n", b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n", b"HTTP/1.1 404 No\r\n\r\n"]),
)
@settings(max_examples=60, deadline=None)
def test_the_engine_s_stream_takes_any_bytes(pieces, answer):
    async def feed() -> None:
        channel = DockerChannel(b"POST / HTTP/1.1\r\n\r\n")
        wire = Wire(channel)
        channel.connection_made(wire)
        wrapped = b"".join(
            struct.pack(">BxxxL", 1 + index % 2, len(piece)) + piece for index, piece in enumerate(pieces)
        )
        for piece in (answer, wrapped[: len(wrapped) // 2], wrapped[len(wrapped) // 2 :]):
            if not wire.cut:
                channel.data_received(piece)
        channel.close()
        assert channel.closed.done() and channel.attached.done()
        assert (channel.attached.exception() is None) == (b"404" not in answer)

    asyncio.run(feed())


answer_headers = st.fixed_dictionaries(
    {},
    optional={
        "status": st.sampled_from(STATUSES) | json_values,
        "exit_code": st.none() | st.integers() | json_values,
        "stdout_bytes": st.integers() | json_values,
        "stderr_bytes": st.integers() | json_values,
        "wall_s": st.floats() | json_values,
        "cpu_s": st.floats() | json_values,
        "state_lost": st.booleans() | json_values,
        "note": json_values,
    },
)
WHOLE = {"status": "ok", "exit_code": None, "stdout_bytes": 0, "stderr_bytes": 0, "wall_s": 0.0, "cpu_s": 0.0, "state_lost": False, "note": ""}  # fmt: skip  # noqa: E501


@given(answer_headers, st.lists(st.binary(max_size=20), min_size=6, max_size=6) | st.lists(st.binary(), max_size=8))
@settings(max_examples=80, deadline=None)
def test_any_answer_is_a_result_or_one_of_the_errors_that_a_session_catches(header, parts):
    for whole in ({}, WHOLE):
        try:
            result = from_frame({**whole, **header}, parts, 1.0, 0.0)
        except (KeyError, TypeError, ValueError):
            continue
        assert isinstance(result, RunResult) and result.status in STATUSES
        for text in (result.stdout, result.stderr, result.value or "", result.note):
            text.encode()


def box_reads(pieces: list[bytes]) -> tuple[int, int]:
    """(exit code, frames read) of a process that reads a stream as a box does."""
    ours, theirs = socket.socketpair()
    count_out, count_in = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        ours.close()
        os.close(2)  # what it says of bad frames
        stream = HostStream(theirs.fileno(), theirs.fileno(), lambda: None)
        try:
            while True:
                stream.next(0.05 if not pieces else 5.0)
                os.write(count_in, b".")
        finally:
            os._exit(99)  # an exception got out of the reader
    theirs.close()
    os.close(count_in)
    try:
        for piece in pieces:
            try:
                ours.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):  # it has had enough
                break
        if pieces:
            ours.shutdown(socket.SHUT_WR)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), len(os.read(count_out, 65536))
    finally:
        ours.close()
        os.close(count_out)


@given(streams().map(lambda pieces: pieces or [b""]))
@settings(max_examples=16, deadline=None)
def test_the_box_s_reader_ends_with_a_known_code_whatever_comes(pieces):
    frames, bad = decoded(pieces)
    code, read = box_reads(pieces)
    assert code == (EXIT_BAD_STREAM if bad else EXIT_STREAM_ENDED)
    assert read <= len(frames)
    if not bad:
        assert read == len(frames)


def test_the_box_s_reader_gives_up_after_a_silence():
    started = time.monotonic()
    assert box_reads([]) == (EXIT_SILENT, 0)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e400, 10**400])
def test_numbers_beyond_reason_in_an_answer_are_malformed(number):
    with pytest.raises((TypeError, ValueError)):
        from_frame({**WHOLE, "stdout_bytes": number, "wall_s": number}, [b""] * 6, 1.0, 0.0)
