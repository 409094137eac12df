"""The far side of `AnswerChecker`: a process that loads verifiers and answers one request at a time.

Started with the arguments FD MEMORY_GIB, where FD is a socket. Frames are a four-byte length
and a body: requests are pickles (they come from us), replies are JSON (they come from a process that ran others' code).
It leaves when the socket closes, and the kernel ends it when a request outlives its own alarm, even if its owner is
gone by then.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from typing import Any

LENGTH = struct.Struct(">I")
ALARM_GRACE_S = 2.0  # the owner's deadline comes first; the alarm is for the case that there is no owner any more


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    limit = int(float(sys.argv[2]) * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
    # A verifier that prints must not write into the run's screen.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while (request := receive(channel)) is not None:
        signal.setitimer(signal.ITIMER_REAL, request["deadline_s"] + ALARM_GRACE_S)
        reply = answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        body = json.dumps(reply).encode()
        channel.sendall(LENGTH.pack(len(body)) + body)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`{"score": …}`, or `{"error": …}` when the verifier cannot be loaded, raises or returns no number."""
    from toolrl.tasks import verifiers

    name = request["verifier"]
    try:
        verifier = verifiers.load(name)
        if request["kind"] == "load":
            return {"score": 0.0}
        score = verifier(request["answer"], request["ground_truth"], request["details"])
        if isinstance(score, str) or score is None:
            return {"error": f"verifier {name!r} returned {score!r}, which is no number"}
        return {"score": float(score)}
    # Anything, a SystemExit of the verifier included, is this one answer's failure; the process lives on.
    except BaseException as error:
        return {"error": f"verifier {name!r} raised {type(error).__name__}: {str(error)[:500]}"}


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """The next request; None when the owner has closed the socket."""
    header = _exactly(channel, LENGTH.size)
    body = _exactly(channel, LENGTH.unpack(header)[0]) if header else None
    return pickle.loads(body) if body else None


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = channel.recv(count - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)
