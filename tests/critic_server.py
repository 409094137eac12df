"""A small real HTTP server that speaks OpenAI's chat completions as a test wants it to."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Said:
    """One response: the assistant's text with status 200, or a bare status."""

    text: str = ""
    status: int = 200
    after_s: float = 0.0
    finish: str = "stop"
    raw: bytes | None = None  # in the place of the protocol's body


@dataclass
class CriticServer:
    """`answer` gives each request its response; what came is in `requests`."""

    answer: Callable[[dict[str, Any]], Said]
    address: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def respond(self, path: str, key: str | None, body: dict[str, Any]) -> tuple[int, bytes]:
        self.requests.append(body)
        self.keys.append(key)
        said = self.answer(body) if path == "/v1/chat/completions" else Said(status=404)
        time.sleep(said.after_s)
        if said.raw is not None:
            return said.status, said.raw
        if said.status != 200:
            return said.status, json.dumps({"error": {"message": f"status {said.status}", "type": "test"}}).encode()
        message = {"role": "assistant", "content": said.text}
        choice = {"index": 0, "message": message, "finish_reason": said.finish}
        whole = {"id": "c1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        return 200, json.dumps(whole).encode()


@contextlib.contextmanager
def serving(answer: Callable[[dict[str, Any]], Said]) -> Iterator[CriticServer]:
    """On a free port of the loopback, while the context lasts."""
    server = CriticServer(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, payload = server.respond(self.path, self.headers.get("Authorization"), body)
            with contextlib.suppress(ConnectionError):  # the client has given up
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.send_header("retry-after-ms", "10")
                self.end_headers()
                self.wfile.write(payload)

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.address = f"http://127.0.0.1:{listening.server_port}/v1"
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()
