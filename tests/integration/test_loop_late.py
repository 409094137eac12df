"""A whole `toolrl train` in which everything comes late: results of deferred calls (one never does), and rewards that are
posted over HTTP (one never is). Its engines get a bare adapter. One run serves every test."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.requirements import need

need("ray", "vllm", "deepspeed", "accelerate", "peft")

from actors.replay import read_ledger, read_trajectories
from tests.integration.eager_policy import write_eager_model
from toolrl import presets
from toolrl.app.reward_callback import FILE
from toolrl.app.train import train
from toolrl.ledger import Ledger
from toolrl.monitors.metrics_log import read_metrics
from toolrl.trajectory import Outcome, Trajectory

pytestmark = pytest.mark.timeout(420)

STEPS, GROUPS, SIZE = 2, 2, 3
NEVER = ("g000001", 2)
PENALTY = 0.25
TOOLS = "[{name: 'tests.integration.deferring:Waiting', mode: deferred, deadline_s: 1.5, timeout_s: 90}, {name: calculator}]"
SETTINGS = [
    "name=late",
    "quiet=true",
    "model.lora={rank: 4, publish: adapter}",
    f"tools={TOOLS}",
    f"rewards.components=[format, {{name: timeout, options: {{penalty: {PENALTY}}}}}]",
    "rewards.weights={judge: 0.5}",
    "rewards.late={names: [judge], source: http, deadline_s: 8}",
    "buffer.max_staleness=0",
    "rollout.parser=tests.integration.deferring:Deferring",
    "rollout.max_turns=6",
    "rollout.max_turn_tokens=60",
    "rollout.max_context_tokens=1024",
    "rollout.park_after_s=0.2",
    "learner.updates_per_batch=2",
    "cold_start.steps=0",
    "tasks.held_out_tasks=0",
    f"loop.steps={STEPS}",
    f"loop.groups_per_step={GROUPS}",
    f"loop.group_size={SIZE}",
]


class Judge(threading.Thread):
    """A reward worker on another machine: knows the run's address and token, nothing else."""

    def __init__(self, file: Path) -> None:
        super().__init__(daemon=True)
        self.file = file
        self.over = threading.Event()
        self.answers: Counter[str] = Counter()

    def run(self) -> None:
        while not self.over.wait(0.1):
            if self.file.exists():
                try:
                    found = self.ask("?name=judge&wait_s=1")["awaited"]
                    for each in found:
                        place = (each["group_id"], each["sample_index"])
                        if place != NEVER:
                            reward = {"trajectory_id": each["trajectory_id"], "name": "judge", "value": place[1]}
                            self.answers[self.ask("", reward)["status"]] += 1
                except (OSError, ValueError, urllib.error.URLError):
                    continue  # the run ends

    def ask(self, query: str, body: dict[str, object] | None = None) -> dict:
        callback = json.loads(self.file.read_text())
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {callback['token']}"}
        with urllib.request.urlopen(
            urllib.request.Request(callback["url"] + query, data, headers), timeout=60
        ) as answer:
            return json.loads(answer.read())


@dataclass(frozen=True)
class Run:
    """What one run left behind."""

    folder: Path
    answers: Counter[str]  # what the judge was told
    rows: list[dict[str, float]]
    ledger: Ledger
    trained: list[Trajectory]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    place = tmp_path_factory.mktemp("runs")
    write_eager_model(place / "eager", 0)
    config = presets.load("quickstart-cpu", [*SETTINGS, f"model.path={place / 'eager'}", f"runs_dir={place}"])
    folder = place / config.name
    judge = Judge(folder / FILE)
    judge.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.getcwd())
        train(config)
    judge.over.set()
    judge.join(10)
    store = folder / "ledger.sqlite"
    yield Run(folder, judge.answers, read_metrics(folder), read_ledger(store), list(read_trajectories(store)))


def test_it_trains_on_rewards_that_are_posted_and_without_the_one_that_never_comes(run: Run) -> None:
    assert not (run.folder / FILE).exists(), "the address goes with the run"
    first, second = run.rows
    assert [row["samples/trained"] for row in run.rows] == [5.0, 6.0]
    assert first["ended/reward_missing"] == first["samples/dropped/reward_missing"] == 1.0
    assert first["reward/component/judge"] == pytest.approx(0.5 * (0 + 1 + 2 + 0 + 1) / 5)
    assert second["reward/component/judge"] == pytest.approx(0.5)
    assert run.ledger.late_rewards == {"accepted": 11, "never_came": 1}
    assert run.answers == {"accepted": 11}
    assert [(t.group_id, t.sample_index) for t in run.trained].count(NEVER) == 0
    assert all(t.rewards["judge"] == 0.5 * t.sample_index for t in run.trained)


def test_it_ends_with_every_sample_accounted_for(run: Run) -> None:
    assert run.ledger.balances
    assert run.ledger.dropped == {"reward_missing": 1}
    assert run.ledger.issued == run.ledger.trained + 1 + run.ledger.ready + run.ledger.generating + run.ledger.leased
    assert run.ledger.trained == len(run.trained) == 11
    assert (run.folder / "final" / "config.json").is_file()


def test_results_of_deferred_calls_come_late_once_and_are_credited_to_the_turn_that_called(run: Run) -> None:
    played = [t for t in run.trained if t.outcome is Outcome.NO_ANSWER]
    assert len(played) >= 9, "turns that ran into a limit show nothing here"
    for trajectory in played:
        shown = [(r.call_id, r.status) for turn in trajectory.turns for r in turn.results]
        assert Counter(shown) == {
            ("call_0", "pending"): 1,
            ("call_1", "pending"): 1,
            ("call_2", "ok"): 1,
            ("call_0", "ok"): 1,
            ("call_1", "timeout"): 1,
        }
        number = {(r.call_id, r.status): n for n, turn in enumerate(trajectory.turns) for r in turn.results}
        assert number["call_0", "pending"] == 1 and number["call_1", "pending"] == 3 < number["call_1", "timeout"]
        late = next(r for turn in trajectory.turns for r in turn.results if (r.call_id, r.status) == ("call_0", "ok"))
        assert "Result of call_0:\nhere" in late.text and number["call_0", "ok"] > 1
        # A turn that only says words is shown what is outstanding, so there are one or two of them.
        by_turn = [[(r.call_id, r.status) for r in results] for results in trajectory.results_of_turns()]
        assert by_turn[:3] == [[("call_0", "ok")], [("call_1", "timeout")], [("call_2", "ok")]] and not any(by_turn[3:])
        assert [turn.rewards["timeout"] for turn in trajectory.policy_turns][:3] == [0, -PENALTY, 0]
        assert "calls_without_result" not in trajectory.metadata
    for row in run.rows:
        assert row["reward/component/timeout"] == pytest.approx(-PENALTY, abs=PENALTY / 3)
        assert row["tool/status/timeout"] > 0 and row["tool/status/ok"] > row["tool/status/timeout"]


def test_the_engine_serves_the_learner_s_adapter_for_a_share_of_the_bytes(run: Run) -> None:
    for row in run.rows:
        assert 0 < row["weights/share_of_merged"] < 0.3 and row["weights/bytes"] > 0
        assert row["gap/max"] < 1e-4  # the second step's samples are of the adapter after the first
    assert {version for t in run.trained for turn in t.policy_turns for version in turn.weight_versions} == {0, 1}
    assert all(row["grad/norm"] > 0 for row in run.rows)
    assert (run.folder / "final" / "adapter" / "adapter_model.safetensors").is_file()
