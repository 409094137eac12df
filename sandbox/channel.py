"""The host's end of the stream to one box: requests with ids, answers matched to them, late ones discarded.

An asyncio protocol; nothing here blocks. `DockerChannel` adds what the attach stream of the Docker Engine API wraps
around it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, cast

from sandbox.inside.frames import Frame, FrameDecoder, FrameError, encode

_MUX = struct.Struct(">BxxxL")  # stream number, length
_STDERR_KEPT = 4096


class ChannelClosed(Exception):
    """The stream ended, or carried what no warden sends."""


class Channel(asyncio.Protocol):
    """One box's stream. Several requests may be under way; the box answers them in order."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._last_id = 0
        self._why = ""
        self.closed = asyncio.get_running_loop().create_future()
        self.on_closed: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The stream is there."""
        # uvloop's transports (Ray's actors run on uvloop) do not derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Decode and hand out. A stream that is no protocol any more is closed."""
        try:
            frames = self._decoder.feed(data)
        except FrameError as error:
            self.fail(str(error))
            return
        for header, parts in frames:
            request = header.get("id")
            future = self._waiting.pop(request, None) if isinstance(request, int) else None
            if future is not None and not future.done():
                future.set_result(Frame(header, parts))

    def connection_lost(self, error: Exception | None) -> None:
        """Nobody waits for ever: all that is under way fails."""
        self._why = self._why or (str(error) if error else "the stream ended")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ChannelClosed(self._why))
        self._waiting.clear()
        if not self.closed.done():
            self.closed.set_result(self._why)
            if self.on_closed is not None:
                self.on_closed()

    def fail(self, why: str) -> None:
        """Close because the peer broke the protocol."""
        self._why = self._why or why
        self.close()

    def close(self) -> None:
        """Close the stream; the box ends itself."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def open(self) -> bool:
        """Whether requests can be sent."""
        return self._transport is not None and not self._transport.is_closing() and not self.closed.done()

    def send(self, header: dict[str, Any], *parts: bytes) -> int:
        """Send one request and return its id. Raises ChannelClosed."""
        if not self.open or self._transport is None:
            raise ChannelClosed(self._why or "the stream is closed")
        self._last_id += 1
        self._transport.write(encode({**header, "id": self._last_id}, *parts))
        return self._last_id

    def cancel(self, request: int) -> None:
        """Tell the box that the answer to a run is not wanted any more."""
        if self.open and self._transport is not None:
            self._transport.write(encode({"op": "cancel", "id": request}))

    async def request(self, header: dict[str, Any], *parts: bytes, deadline_s: float) -> Frame:
        """Send one request and wait for its answer. Raises ChannelClosed, TimeoutError; on cancellation the run is
        cancelled."""
        request = self.send(header, *parts)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Frame] = loop.create_future()
        self._waiting[request] = future
        timer = loop.call_later(deadline_s, self._expire, request)
        try:
            return await future
        except asyncio.CancelledError:
            self.cancel(request)
            raise
        finally:
            timer.cancel()
            self._waiting.pop(request, None)

    def _expire(self, request: int) -> None:
        future = self._waiting.pop(request, None)
        if future is not None and not future.done():
            future.set_exception(TimeoutError("the box did not answer within its deadline"))


class DockerChannel(Channel):
    """A channel over a hijacked attach request: an HTTP answer first, then stdout and stderr multiplexed."""

    def __init__(self, request: bytes) -> None:
        super().__init__()
        self._request = request
        self._raw = bytearray()
        self._upgraded = False
        self.attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stderr = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the attach stream."""
        super().connection_made(transport)
        assert self._transport is not None
        self._transport.write(self._request)

    def connection_lost(self, error: Exception | None) -> None:
        """Also before the engine has agreed."""
        super().connection_lost(error)
        if not self.attached.done():
            self.attached.set_exception(ChannelClosed(f"attach failed: {self._why}"))
            self.attached.exception()  # whoever waits sees it; nobody waiting is no error

    def data_received(self, data: bytes) -> None:
        """Take off the wrapping."""
        self._raw += data
        if not self._upgraded and not self._read_answer():
            return
        while len(self._raw) >= _MUX.size:
            stream, length = _MUX.unpack_from(self._raw)
            end = _MUX.size + length
            if len(self._raw) < end:
                return
            payload = bytes(self._raw[_MUX.size : end])
            del self._raw[:end]
            if stream == 1:
                super().data_received(payload)
            elif stream == 2:
                self.stderr += payload
                del self.stderr[:-_STDERR_KEPT]

    def _read_answer(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._raw[:end])
        del self._raw[: end + 4]
        status = head.split(b" ", 2)[1:2]
        if status not in ([b"101"], [b"200"]):
            self.fail(f"the engine refused the attach: {head.splitlines()[0].decode(errors='replace')}")
            return False
        self._upgraded = True
        if not self.attached.done():
            self.attached.set_result(None)
        return True
