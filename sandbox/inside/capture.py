"""What a run printed, under a cap: the head and the tail are kept, the middle is counted. Memory stays flat whatever
comes."""

from __future__ import annotations


class Capture:
    """One stream. Keeps at most `cap` bytes, half from the start and half from the end."""

    def __init__(self, cap: int) -> None:
        self._half = max(cap // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._half:  # trimmed in strides, not at every read
            del self._tail[: -self._half]

    def parts(self) -> tuple[bytes, bytes]:
        """Head and tail. Nothing was left out where their lengths sum to `total`; else neither cuts a character."""
        head, tail = bytes(self._head), bytes(self._tail[-self._half :])
        if len(head) + len(tail) == self.total:
            return head, tail
        return _whole_end(head), _whole_start(tail)


def _whole_end(data: bytes) -> bytes:
    """`data` without a UTF-8 character that is cut at its end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # the first byte of the last character
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return data[:-back] if needed > back else data
    return data


def _whole_start(data: bytes) -> bytes:
    """`data` without the rest of a UTF-8 character that is cut at its start."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]
