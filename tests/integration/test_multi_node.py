"""A run over three hosts with addresses of their own: head with the learner, a rollout node, a sandbox node. It is submitted to
the cluster's job server and followed. The rollout node is cut off and comes back; it is killed and another joins; nothing is
lost. `toolrl stop` ends it with a checkpoint; its exit code comes back, and nothing of it is left on the cluster."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.requirements import need

need("ray", "vllm", "deepspeed", "netns")

from actors.replay import read_ledger
from tests.integration.net_hosts import Host, hosts
from toolrl.monitors.metrics_log import read_metrics

STEPS, GROUPS, SIZE = 100_000, 2, 4  # it is told to end long before
NODE = Path(__file__).parents[2] / "deploy" / "docker" / "node.sh"
SETTINGS: dict[str, Any] = {
    "base": "quickstart-cpu",
    "name": "spread",
    "quiet": True,
    "cold_start": {"steps": 20, "traces": 64},
    "tasks": {"held_out_tasks": 0},
    "sandbox": {"backend": "process"},
    "loop": {"steps": STEPS, "groups_per_step": GROUPS, "group_size": SIZE, "checkpoint_every_steps": 4},
    "learner": {"updates_per_batch": 1},
    "buffer": {"drop_uniform_groups": False},
    "rollout": {"lease_s": 8.0},
    "placement": {"sandbox": "hosts"},
    "cluster": {
        "groups": [
            {"name": "head", "cpus": 2, "resources": {"group-learner": 1}},
            {"name": "rollout", "cpus": 1},
            {"name": "sandbox", "cpus": 1},
        ]
    },
}

OF_RAY = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def wait_until(what: str, done: Callable[[], bool], deadline_s: float, log: Path) -> None:
    until = time.monotonic() + deadline_s
    while not done():
        assert time.monotonic() < until, f"{what} did not come; {log.read_text(errors='replace')[-3000:]}"
        time.sleep(0.1)


def test_a_run_over_three_hosts_survives_a_cut_and_a_death(tmp_path: Path) -> None:
    token, settings = tmp_path / "ray-token", tmp_path / "run.yaml"
    token.write_text(secrets.token_hex(32))
    cluster = SETTINGS["cluster"] | {"mounts": [{"target": str(tmp_path), "source": str(tmp_path)}]}
    settings.write_text(json.dumps(SETTINGS | {"runs_dir": str(tmp_path), "cluster": cluster}))
    shared = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "TOOLRL_JOIN_DEADLINE_S": "120",
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        # Heartbeats of Ray: a host that is gone is noticed in seconds, one that is cut off for less is not.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "4000",
        "RAY_health_check_failure_threshold": "4",
    }

    def node(host: Host, *words: str) -> None:
        environment = shared | {"TOOLRL_NODE_ADDRESS": host.address}
        host.run(["bash", str(NODE), *words], tmp_path / f"{host.name}.log", environment)

    def worker(host: Host, cpus: int, resources: str) -> None:
        flags = [f"--num-cpus={cpus}", "--object-store-memory=100000000", f"--resources={resources}"]
        node(host, "worker", made["head"].address, *flags)

    def toolrl(command: str) -> str:
        return made["head"].ask(["toolrl", command, "spread", "--runs-dir", str(tmp_path)], shared, timeout_s=120)

    def step() -> int:
        rows = read_metrics(tmp_path / "spread") if (tmp_path / "spread" / "metrics.jsonl").is_file() else []
        return int(rows[-1]["step"]) if rows else 0

    with hosts("head", "rollout", "sandbox", "spare") as made:
        log = tmp_path / "launch.log"
        head_flags = ["--num-cpus=2", "--object-store-memory=100000000", '--resources={"group-learner":1}']
        node(made["head"], "head", "3", *head_flags, "--", "sh", "-c", f"touch {tmp_path}/there; sleep 600")
        worker(made["rollout"], 1, '{"group-rollout":1}')
        worker(made["sandbox"], 1, '{"sandbox":1}')
        wait_until("the cluster", (tmp_path / "there").exists, 120, tmp_path / "head.log")
        run = made["head"].run(["toolrl", "launch", str(settings), "--target", "ray"], log, shared)
        wait_until("step 2", lambda: step() >= 2, 200, log)

        made["rollout"].cut_off()
        time.sleep(3)
        made["rollout"].reconnect()
        reached = step()
        wait_until("a step after the cut", lambda: step() > reached + 1, 90, log)

        made["rollout"].kill()
        worker(made["spare"], 1, '{"group-rollout":1}')
        reached = step()
        wait_until("a step after the death", lambda: step() > reached + 3, 200, log)

        assert "ray: RUNNING" in toolrl("status")
        assert len(work(made.values())) > 4
        toolrl("stop")
        wait_until("the end", lambda: run.poll() is not None, 30, log)
        assert run.returncode == 0, log.read_text(errors="replace")[-3000:]
        assert "ray: STOPPED" in toolrl("status")
        wait_until("an end of everything", lambda: not work(made.values()), 20, log)

    said = log.read_text()
    assert "submitted to ray as spread-" in said
    assert "`toolrl train spread --resume` goes on from there" in said
    last = step()
    assert (tmp_path / "spread" / "checkpoints" / f"step-{last}" / "state.json").is_file()
    ledger = read_ledger(tmp_path / "spread" / "ledger.sqlite")
    assert ledger.balances
    assert ledger.trained == last * GROUPS * SIZE
    rows = read_metrics(tmp_path / "spread")
    assert [row["step"] for row in rows] == list(range(1, last + 1))
    assert sum(row["tool/calls_per_trajectory"] for row in rows) > 0


def work(machines: Iterable[Host]) -> list[str]:
    """What runs on them for the run: actors, engines."""
    titles = []
    for pid in (pid for host in machines for pid in host.pids()):
        with contextlib.suppress(psutil.NoSuchProcess):
            titles.append(" ".join(psutil.Process(pid).cmdline()))
    return [title for title in titles if title.startswith(("ray::", "VLLM")) and not title.startswith(OF_RAY)]
