"""A Compose cluster of the CPU image really trains (`make compose-check`; not part of CI: the image takes minutes and gigabytes).

Head, learner, rollout worker and sandbox host are containers of one machine; the boxes are containers beside them. One run is
followed to its end. A second one is stopped in mid-run, and goes on. After each, nothing of it is left. Prints a table; the exit
code is 0 when all of it held.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.replay import read_ledger
from sandbox import labels
from tests import cpu_image
from toolrl.app.launch import submission
from toolrl.app.run_folder import RunFolder
from toolrl.monitors.metrics_log import read_metrics

STEPS, GROUPS, SIZE = 4, 2, 4
# What each node is to hold, by the titles of Ray's processes.
PLACES = {"head": "ReplayBuffer", "learner": "RankActor", "rollout": "RolloutWorker", "sandbox": "SandboxHost"}
RUN_DEADLINE_S, STOP_DEADLINE_S = 1200, 600
SETTINGS: dict[str, Any] = {
    "base": "quickstart-cpu",
    "runs_dir": "/runs",
    "cold_start": {"steps": 60, "traces": 256},
    "tasks": {"held_out_tasks": 0},
    "sandbox": {"backend": "docker"},
    "loop": {"steps": STEPS, "groups_per_step": GROUPS, "group_size": SIZE, "checkpoint_every_steps": 2},
    "buffer": {"drop_uniform_groups": False},
    "placement": {"sandbox": "hosts"},
}
NODES = [{"name": name, "cpus": min(2, os.cpu_count() or 1), "memory_gib": 4} for name in PLACES]


class Failed(Exception):
    """Something did not hold; the message says what."""


@dataclass
class Run:
    """A launched run, and what was seen of it while it ran."""

    name: str
    runs: Path  # of this machine
    log: Path
    process: subprocess.Popen[bytes]
    placed: dict[str, set[str]] = field(default_factory=dict)  # node -> those of PLACES that it held
    boxes: int = 0  # most at once
    strangers: set[str] = field(default_factory=set)  # boxes that another than the sandbox node made

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.runs / self.name)

    def step(self) -> int:
        rows = read_metrics(self.folder.path) if self.folder.metrics.is_file() else []
        return int(rows[-1]["step"]) if rows else 0

    def look(self) -> None:
        """Which node holds what now."""
        nodes = dict(line.split() for line in ps(project(self.name), "{{.Label `com.docker.compose.service`}} {{.ID}}"))
        for node, container in nodes.items():
            there = [
                line for line in said("docker", "top", container, "-eo", "pid,args").splitlines() if "ray::" in line
            ]
            self.placed.setdefault(node, set()).update(part for part in PLACES.values() if part in " ".join(there))
        found = ps(f"{labels.RUN}={self.name}", f"{{{{.Label `{labels.OWNER}`}}}}")
        self.boxes = max(self.boxes, len(found))
        if found and "sandbox" in nodes:
            # An owner's name holds the inode of its pid namespace.
            namespace = said("docker", "exec", nodes["sandbox"], "stat", "-Lc", "%i", "/proc/self/ns/pid").strip()
            self.strangers |= {owner for owner in found if namespace and owner.split("/")[1] != namespace}

    def wait(self, what: str, there: Callable[[], bool], deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        while not there():
            if time.monotonic() > until or (self.process.poll() is not None and not there()):
                raise Failed(f"{what} did not come; {self.log.read_text(errors='replace')[-3000:]}")
            self.look()
            time.sleep(1)

    def end(self) -> None:
        """Waits for it. Raises Failed where it did not end well, or left something."""
        self.wait("the end", lambda: self.process.poll() is not None, RUN_DEADLINE_S)
        if self.process.returncode:
            raise Failed(f"exit code {self.process.returncode}; {self.log.read_text(errors='replace')[-3000:]}")
        self.leaves_nothing()
        account = read_ledger(self.folder.ledger)
        steps = [int(row["step"]) for row in read_metrics(self.folder.path)]
        if not account.balances or account.trained != len(steps) * GROUPS * SIZE:
            raise Failed(f"the ledger does not hold: {account}, {len(steps)} steps of {GROUPS * SIZE}")
        if steps != list(range(1, len(steps) + 1)):
            raise Failed(f"the steps are {steps}")

    def leaves_nothing(self) -> None:
        left = ps(project(self.name), "{{.Names}}") + ps(f"{labels.RUN}={self.name}", "{{.Names}}")
        left += said("docker", "network", "ls", "--quiet", f"--filter=label={project(self.name)}").split()
        if left:
            raise Failed(f"it left {', '.join(left)}")


def launch(runs: Path, name: str, *words: str) -> Run:
    """Starts `toolrl launch`, which follows the run."""
    log = runs.parent / f"{name}.log"
    command = [sys.executable, "-m", "toolrl.app.cli", "launch", *words, "--target", "compose"]
    return Run(name, runs, log, subprocess.Popen(command, stdout=log.open("ab"), stderr=subprocess.STDOUT))


def project(name: str) -> str:
    """The label of a cluster's containers and network."""
    return f"com.docker.compose.project={name}"


def ps(label: str, shown: str) -> list[str]:
    return said("docker", "ps", "--all", f"--filter=label={label}", f"--format={shown}").splitlines()


def said(*words: str) -> str:
    """What a command prints; nothing where what it asks for has gone meanwhile."""
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def trains(run: Run) -> str:
    run.end()
    wrong = [f"{node} held {run.placed.get(node)}" for node, part in PLACES.items() if run.placed.get(node) != {part}]
    if wrong:
        raise Failed(f"not every part was on its own node: {'; '.join(wrong)}")
    if not run.boxes or run.strangers:
        raise Failed(f"{run.boxes} boxes; made by others than the sandbox node: {run.strangers or 'none'}")
    rows = read_metrics(run.folder.path)
    calls = sum(row["tool/calls_per_trajectory"] * GROUPS * SIZE for row in rows)
    if len(rows) != STEPS or not calls:
        raise Failed(f"{len(rows)} steps, {calls:.0f} calls")
    parts = ("time/rollout_s", "time/learn_s", "time/publish_s")
    times = ", ".join(f"{sum(row[part] for part in parts):.1f}" for row in rows)
    return f"steps of {times} s, {calls:.0f} calls, {run.boxes} boxes beside the nodes; nothing is left"


def stops(run: Run) -> str:
    run.wait("step 2", lambda: run.step() >= 2, RUN_DEADLINE_S)
    began = time.monotonic()
    command = [sys.executable, "-m", "toolrl.app.cli", "stop", run.name, "--runs-dir", str(run.runs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=STOP_DEADLINE_S, check=False)
    took_s = time.monotonic() - began
    if done.returncode:
        raise Failed(f"toolrl stop ended with {done.returncode}: {done.stderr[-2000:]}")
    run.leaves_nothing()
    run.end()
    checkpoint = run.folder.latest_checkpoint()
    if checkpoint is None or checkpoint.step != run.step():
        raise Failed(f"step {run.step()}, but the last checkpoint is {checkpoint}")
    return f"ended after step {run.step()} with a checkpoint, gone in {took_s:.0f} s"


def goes_on(run: Run, stopped_at: int) -> str:
    run.end()
    if run.step() != stopped_at + STEPS:
        raise Failed(f"stopped at step {stopped_at}, now at {run.step()}")
    return f"from step {stopped_at + 1} to {run.step()}"


def main() -> int:
    """0: all of it held."""
    table: list[tuple[str, float, str]] = []

    def check(what: str, action: Callable[[], str]) -> None:
        print(f"{what} …", flush=True)
        began = time.monotonic()
        found = action()
        table.append((what, time.monotonic() - began, found))

    work = Path(tempfile.mkdtemp(prefix="toolrl-compose-"))
    runs, settings = work / "runs", work / "run.yaml"
    cluster = {"image": cpu_image.IMAGE, "groups": NODES, "mounts": [{"target": "/runs", "source": str(runs)}]}
    settings.write_text(json.dumps(SETTINGS | {"cluster": cluster}))
    launched: list[Run] = []

    def start(name: str, *words: str) -> Run:
        launched.append(launch(runs, name, *words))
        return launched[-1]

    def build() -> str:
        cpu_image.build()
        return f"{cpu_image.IMAGE}, {cpu_image.size_gb():.2f} GB"

    try:
        check("the image", build)
        check("a run to its end", lambda: trains(start("compose-check", str(settings), "name=compose-check")))
        name, long = "compose-stop", ("loop.steps=500", "loop.checkpoint_every_steps=0")
        check("a run that is stopped", lambda: stops(start(name, str(settings), f"name={name}", *long)))
        at = launched[-1].step()
        onwards = (name, "--resume", "--runs-dir", str(runs), f"loop.steps={at + STEPS}")
        check("the stopped run goes on", lambda: goes_on(start(name, *onwards), at))
    except Failed as error:
        print(f"failed: {error}\nwhat there is lies in {work}", file=sys.stderr)
        return 1
    finally:
        for run in launched:
            if run.process.poll() is None:
                run.process.terminate()
                run.process.wait()
            left = submission.launched(run.name, runs)
            if left is not None and ps(project(run.name), "{{.Names}}"):
                submission.stop(left)
    shutil.rmtree(work)
    for what, took_s, found in table:
        print(f"{what:<24} {took_s:6.0f} s  {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
