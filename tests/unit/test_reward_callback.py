"""Late rewards over HTTP: who may, what is answered, what is refused; against the real store."""

from __future__ import annotations

import http.client
import json
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from actors.replay import AwaitedReward, ReplaySettings, ReplayStore, RewardAnswer
from tests.replay_samples import Clock, sample
from toolrl.app import reward_callback as http_rewards
from toolrl.errors import UserError
from toolrl.reward_records import await_rewards


class Store:
    """The store behind a lock, as the buffer's one thread is."""

    def __init__(self, path: Path) -> None:
        self.clock = Clock()
        self.settings = ReplaySettings(group_size=2, batch_groups=1, reward_deadline_s=100.0)
        self.store = ReplayStore(path, self.settings, self.clock)
        self.lock = threading.Lock()
        self.asked = 0

    def deliver(self, trajectory_id: str, name: str, value: Any) -> RewardAnswer:
        with self.lock:
            return self.store.deliver_reward(trajectory_id, name, value)

    def claim(self, name: str, *, limit: int, claim_s: float, timeout_s: float) -> list[AwaitedReward]:
        self.asked += 1
        until = time.monotonic() + timeout_s
        while True:
            with self.lock:
                found = self.store.claim_unrewarded(name, limit=limit, claim_s=claim_s)
            if found or time.monotonic() >= until:
                return found
            time.sleep(0.01)


class Client:
    def __init__(self, folder: Path) -> None:
        self.file = folder / http_rewards.FILE
        found = json.loads(self.file.read_text())
        self.token, self.address = found["token"], urlsplit(found["url"])

    def ask(self, method: str, path: str = "/rewards", body: Any = None, token: str | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.address.hostname or "", self.address.port, timeout=10)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token if token is None else token}"}
        connection.request(method, path, body=data, headers=headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def post(self, trajectory_id: str, value: Any, name: str = "judge") -> tuple[int, str]:
        code, answer = self.ask("POST", body={"trajectory_id": trajectory_id, "name": name, "value": value})
        return code, answer["status"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "r.db")
    ticket = made.store.lease_ticket("w0")
    assert ticket is not None
    finished = [sample(ticket.group_id, index) for index in range(2)]
    for each in finished:
        each.prompt_ids = [each.sample_index]
        await_rewards(each, {"judge": 2.0})
    made.store.put("w0", finished)
    return made


@pytest.fixture
def client(store: Store, tmp_path: Path) -> Iterator[Client]:
    with http_rewards.reward_callback(store, tmp_path, "127.0.0.1", 0):
        yield Client(tmp_path)


def test_trajectories_are_fetched_and_their_rewards_posted(client: Client, store: Store) -> None:
    code, found = client.ask("GET", "/rewards?name=judge&limit=5&wait_s=0")
    assert code == 200
    first, second = found["awaited"]
    assert (first["sample_index"], first["outcome"], first["turns"][0]["kind"]) == (0, "answered", "policy")
    assert client.ask("GET", "/rewards?name=judge&wait_s=0")[1] == {"awaited": []}, "they are claimed"
    assert client.post(first["trajectory_id"], 0.5) == (200, "accepted")
    assert client.post(second["trajectory_id"], [1]) == (200, "accepted")
    batch = store.store.lease_batch("learner", 1, 0)
    assert batch is not None
    one, other = batch.trajectories()[0]
    assert (one.rewards["judge"], other.turns[0].rewards["judge"]) == (1.0, 2.0)


def test_wrong_rewards_are_answered_with_the_reason_and_counted(client: Client, store: Store) -> None:
    first, second = (each["trajectory_id"] for each in client.ask("GET", "/rewards?name=judge&wait_s=0")[1]["awaited"])
    assert client.post(first, float("nan")) == (422, "invalid")
    assert client.post(first, 1.0) == (200, "accepted")
    assert client.post(first, 1.0) == (409, "duplicate")
    assert client.post("g000007-0:00", 1.0) == (404, "unknown")
    assert client.post(second, 1.0, name="jugde") == (404, "unknown")
    store.clock.now += 101
    assert client.post(second, 1.0) == (410, "late")
    expected = {"invalid": 1, "accepted": 1, "duplicate": 1, "unknown": 2, "late": 1, "never_came": 1}
    assert store.store.ledger().late_rewards == expected


def test_only_who_holds_the_token_may(client: Client, store: Store) -> None:
    body = {"trajectory_id": "x", "name": "judge", "value": 1}
    for method, token in (("GET", ""), ("POST", "wrong"), ("POST", client.token[:-1])):
        code, answer = client.ask(method, "/rewards?name=judge", body, token=token)
        assert (code, "token" in answer["error"]) == (401, True)
    assert store.store.ledger().late_rewards == {}
    assert stat.S_IMODE(client.file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "why"),
    [
        ("GET", "/", None, 404, "/rewards"),
        ("GET", "/rewards", None, 400, "which reward"),
        ("GET", "/rewards?name=judge&limit=x", None, 400, "numbers"),
        ("GET", "/rewards?name=judge&wait_s=1e9", None, 400, "wait_s 0 to 30"),
        ("GET", "/rewards?name=judge&claim_s=nan", None, 400, "claim_s"),
        ("POST", "/rewards", b"{", 400, "no JSON"),
        ("POST", "/rewards", b"[" * 60000, 400, "no JSON"),
        ("POST", "/rewards", [1], 400, "trajectory_id, name and value"),
        ("POST", "/rewards", {"trajectory_id": "x", "name": "judge"}, 400, "trajectory_id, name and value"),
        ("POST", "/rewards", b" " * (http_rewards.MAX_BODY_BYTES + 1), 413, "at most 65536 bytes"),
    ],
)
def test_what_is_no_request_is_told_why(
    client: Client, store: Store, method: str, path: str, body: Any, code: int, why: str
) -> None:
    found, answer = client.ask(method, path, body)
    assert (found, why in answer["error"]) == (code, True), answer
    assert store.store.ledger().late_rewards == {}


def test_a_buffer_that_fails_is_no_fault_of_who_asks(client: Client, store: Store) -> None:
    store.store.close()
    code, answer = client.ask("GET", "/rewards?name=judge")
    assert (code, "ProgrammingError" in answer["error"]) == (503, True)


def test_whoever_waits_is_answered_before_the_address_closes(store: Store, tmp_path: Path) -> None:
    answers: list[tuple[int, Any]] = []
    with http_rewards.reward_callback(store, tmp_path, "127.0.0.1", 0):
        client = Client(tmp_path)
        assert len(client.ask("GET", "/rewards?name=judge&limit=5&wait_s=0")[1]["awaited"]) == 2
        waiting = threading.Thread(target=lambda: answers.append(client.ask("GET", "/rewards?name=judge&wait_s=9")))
        waiting.start()
        while store.asked < 3:  # it looks again
            time.sleep(0.01)
    asked = store.asked
    waiting.join()
    time.sleep(2 * http_rewards.LOOK_EVERY_S)
    assert (answers, store.asked) == ([(200, {"awaited": []})], asked)


def test_the_address_goes_with_the_run_and_one_that_is_taken_is_named(store: Store, tmp_path: Path) -> None:
    with http_rewards.reward_callback(store, tmp_path, "127.0.0.1", 0) as url:
        port = urlsplit(url).port
        assert port is not None
        with (
            pytest.raises(UserError, match=f"http_port={port}: cannot be opened"),
            http_rewards.reward_callback(store, tmp_path, "127.0.0.1", port),
        ):
            pass
    assert not (tmp_path / http_rewards.FILE).exists()
    with pytest.raises(OSError, match="refused"):
        http.client.HTTPConnection("127.0.0.1", port, timeout=5).request("GET", "/")
