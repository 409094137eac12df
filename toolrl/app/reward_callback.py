"""An address of the run's own to which late rewards are posted (`rewards.late.source=http`). Standard library only.

    GET  /rewards?name=NAME[&limit=16][&claim_s=60][&wait_s=10]    trajectories that wait for the reward, as JSON
    POST /rewards    {"trajectory_id": …, "name": …, "value": number, or a list with one a policy turn}

Both need the run's token (`Authorization: Bearer TOKEN`); address and token lie in runs/NAME/reward-callback.json, which
only its owner can read and which goes with the run. Whoever holds the token decides what the policy is trained towards,
so the address is loopback unless the config says otherwise.

Invariants: a request is bounded in bytes and time; a wrong one is answered with the reason and changes nothing. No request asks
the buffer once the address is closed: a thread that waits for a buffer whose Ray has ended computes as fast as it can.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Thread
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from actors.replay import AwaitedReward, RewardAnswer
from toolrl.errors import UserError

FILE = "reward-callback.json"
MAX_BODY_BYTES = 64 * 1024
MAX_WAIT_S = 30.0
MAX_TRAJECTORIES = 64
SOCKET_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.5  # who waits for trajectories sees so soon that the address closes
CLOSES_WITHIN_S = 10.0
CODES = {"accepted": 200, "duplicate": 409, "late": 410, "unknown": 404, "invalid": 422}


class LateRewards(Protocol):
    """What the address opens: the buffer's two methods, called from threads."""

    def deliver(self, trajectory_id: str, name: str, value: Any) -> RewardAnswer: ...

    def claim(self, name: str, *, limit: int, claim_s: float, timeout_s: float) -> list[AwaitedReward]: ...


class _Refused(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class _Door:
    """Who asks the buffer, and whether anybody may."""

    def __init__(self) -> None:
        self.closed = False
        self._inside = 0
        self._changed = Condition()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        with self._changed:
            if self.closed:
                raise _Refused(503, "the run is ending")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Waits for those inside."""
        with self._changed:
            self.closed = True
            self._changed.wait_for(lambda: not self._inside, CLOSES_WITHIN_S)


@contextlib.contextmanager
def reward_callback(rewards: LateRewards, folder: Path, host: str, port: int) -> Iterator[str]:
    """The address while the context lasts; yields its URL.

    Raises:
        UserError: host and port cannot be had.
    """
    token, door = secrets.token_urlsafe(32), _Door()
    try:
        server = ThreadingHTTPServer((host, port), _handler(rewards, token, door))
    except (OSError, OverflowError) as error:
        raise UserError(f"rewards.late.http_host={host}, http_port={port}: cannot be opened: {error}") from error
    server.daemon_threads = True
    bound, number = server.server_address[:2]
    url = f"http://{bound!s}:{number}/rewards"
    thread = Thread(target=server.serve_forever, name="reward-callback", daemon=True)
    thread.start()
    file = folder / FILE
    try:
        with contextlib.suppress(FileNotFoundError):
            file.unlink()  # of a run that was killed
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
            json.dump({"url": url, "token": token}, written)
        yield url
    finally:
        server.shutdown()
        door.close()
        server.server_close()
        thread.join()
        file.unlink(missing_ok=True)


def as_json(awaited: AwaitedReward) -> dict[str, Any]:
    """What a reward worker is told of a trajectory."""
    t = awaited.trajectory
    return {
        "trajectory_id": awaited.trajectory_id,
        "name": awaited.name,
        "seconds_left": awaited.seconds_left,
        "group_id": t.group_id,
        "task_id": t.task_id,
        "sample_index": t.sample_index,
        "outcome": None if t.outcome is None else t.outcome.value,
        "answer": t.answer,
        "rewards": t.rewards,
        "prompt_ids": t.prompt_ids,
        "turns": [
            {"kind": turn.kind, "text": turn.text}
            if turn.kind == "policy"
            else {
                "kind": turn.kind,
                "results": [{"name": r.name, "status": r.status, "text": r.text} for r in turn.results],
            }
            for turn in t.turns
        ],
    }


def _handler(rewards: LateRewards, token: str, door: _Door) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = SOCKET_TIMEOUT_S

        def do_GET(self) -> None:
            self._answered(self._claim)

        def do_POST(self) -> None:
            self._answered(self._deliver)

        def _answered(self, act: Any) -> None:
            try:
                self._check()
                with door.asking():
                    code, body = act()
            except _Refused as error:
                code, body = error.code, {"error": str(error)}
            # Whatever the buffer's side raises is no fault of who asks: 503, to be tried again.
            except Exception as error:
                code, body = 503, {"error": f"{type(error).__name__}: {error}"[:500]}
            data = json.dumps(body).encode()
            with contextlib.suppress(OSError):  # nobody waits for the answer any more
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def _check(self) -> None:
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), token.encode()):
                raise _Refused(401, f"Authorization: Bearer TOKEN is needed; the run's token is in its {FILE}")
            if urlsplit(self.path).path != "/rewards":
                raise _Refused(404, "there is /rewards and nothing else")

        def _claim(self) -> tuple[int, Any]:
            asked = {name: values[-1] for name, values in parse_qs(urlsplit(self.path).query).items()}
            if not asked.get("name"):
                raise _Refused(400, "name=… is needed: which reward?")
            try:
                limit = min(max(int(asked.get("limit", "16")), 1), MAX_TRAJECTORIES)
                claim_s, wait_s = (float(asked.get(key, default)) for key, default in (("claim_s", 60), ("wait_s", 10)))
            except ValueError as error:
                raise _Refused(400, f"limit, claim_s and wait_s are numbers: {error}") from error
            if not 0 <= claim_s < float("inf") or not 0 <= wait_s <= MAX_WAIT_S:
                raise _Refused(400, f"claim_s is 0 or more seconds, wait_s 0 to {MAX_WAIT_S:g}")
            found: list[AwaitedReward] = []
            until = time.monotonic() + wait_s
            while not found:
                left = max(until - time.monotonic(), 0.0)
                found = rewards.claim(asked["name"], limit=limit, claim_s=claim_s, timeout_s=min(left, LOOK_EVERY_S))
                if left == 0.0 or door.closed:
                    break
            return 200, {"awaited": [as_json(each) for each in found]}

        def _deliver(self) -> tuple[int, Any]:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
                raise _Refused(413, f"Content-Length is needed, at most {MAX_BODY_BYTES} bytes")
            try:
                body = json.loads(self.rfile.read(int(length)))
            except (ValueError, RecursionError, OSError) as error:
                raise _Refused(400, f"the body is no JSON: {error}") from error
            if not isinstance(body, dict) or not {"trajectory_id", "name", "value"} <= body.keys():
                raise _Refused(400, "an object with trajectory_id, name and value is needed")
            answer = rewards.deliver(str(body["trajectory_id"]), str(body["name"]), body["value"])
            return CODES[answer.status], {"status": answer.status, "why": answer.why}

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the ledger counts what was delivered."""

    return Handler
