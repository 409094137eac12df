"""A small run on a cluster of `slurm_cluster`: launched, watched, asked about."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.integration.slurm_cluster import SlurmCluster
from toolrl.monitors.metrics_log import read_metrics

LOOK_EVERY_S = 0.2
GONE_DEADLINE_S = 40.0


class SlurmRun:
    """A run of many short steps, so that it is not over before it is told to end."""

    name = "slurmed"
    STEPS = 100_000

    def __init__(
        self, cluster: SlurmCluster, groups: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any] | None = None
    ) -> None:
        """
        Args:
            groups: by name, what `cluster.groups` says of them.
            settings: further settings of the run.
        """
        self.cluster = cluster
        self.runs = cluster.folder / "runs"
        self.runs.mkdir()
        self.folder = self.runs / self.name
        self.launches = self.runs / "launches" / self.name
        self._log = cluster.folder / "launch.log"
        self._following: subprocess.Popen[bytes] | None = None
        self._config = cluster.folder / "config.yaml"
        environment = f"export PATH={Path(sys.executable).parent}:$PATH"
        whole = {
            "base": "quickstart-cpu",
            "name": self.name,
            "runs_dir": str(self.runs),
            "cold_start": {"steps": 10, "traces": 64},
            "tasks": {"held_out_tasks": 0},
            "loop": {"steps": self.STEPS, "groups_per_step": 2, "group_size": 4, "checkpoint_every_steps": 4},
            "learner": {"updates_per_batch": 1},
            "cluster": {
                "mounts": [{"target": str(self.runs), "source": str(self.runs)}],
                "groups": [{"name": name, "memory_gib": 4, **group} for name, group in groups.items()],
                "setup": [environment],
                "environment": {"TOOLRL_RAY_FILES": str(cluster.sockets)},
            },
            **({"sandbox": {"backend": "process"}} if settings is None else settings),
        }
        self._config.write_text(json.dumps(whole))

    def launch(self, *words: str) -> None:
        """`toolrl launch` of the config, or with `--resume` of the run that there is; it follows."""
        source = [self.name, "--runs-dir", str(self.runs)] if "--resume" in words else [str(self._config)]
        command = ["toolrl", "launch", *source, *words, "--target", "slurm"]
        self._following = self.cluster.start(command, self._log)

    def toolrl(self, *words: str, timeout_s: float = 120.0) -> str:
        """What a command about the run prints, by somebody who logged in."""
        return self.cluster.run("toolrl", *words, "--runs-dir", str(self.runs), timeout_s=timeout_s)

    def said(self) -> str:
        """What `toolrl launch` has printed so far."""
        return self._log.read_text(errors="replace")

    def exit_code(self, deadline_s: float = 60.0) -> int:
        """Of `toolrl launch`."""
        assert self._following is not None
        return self._following.wait(deadline_s)

    def log(self) -> str:
        """What the run itself has said, over all its jobs."""
        place = self.folder / "log.txt"
        return place.read_text(errors="replace") if place.is_file() else ""

    def step(self) -> int:
        """The last step."""
        rows = read_metrics(self.folder) if (self.folder / "metrics.jsonl").is_file() else []
        return int(rows[-1]["step"]) if rows else 0

    def checkpoint(self) -> int:
        """The step of the last whole checkpoint."""
        whole = self.folder.glob("checkpoints/step-*/state.json")
        return max((int(path.parent.name.removeprefix("step-")) for path in whole), default=0)

    def job(self) -> str:
        """Slurm's number of it."""
        return str(json.loads((self.launches / "launch.json").read_text())["id"])

    def wait_for_step(self, step: int, deadline_s: float = 400.0) -> None:
        self.wait_until(f"step {step}", lambda: self.step() >= step, deadline_s)

    def wait_until(self, what: str, done: Callable[[], bool], deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        while not done():
            ended = self._following is not None and self._following.poll() is not None
            assert not ended or done(), f"the launch ended before {what}; {self.said()[-5000:]}"
            assert time.monotonic() < until, f"{what} did not come; {self.said()[-5000:]}"
            time.sleep(LOOK_EVERY_S)

    def assert_nothing_is_left(self) -> None:
        """No process of a job on any host, no files of Ray, no sandbox container of this run."""
        _, alive = psutil.wait_procs(self.cluster.processes(), timeout=GONE_DEADLINE_S)
        assert not alive, [(process.pid, process.cmdline()) for process in alive]
        assert not list(self.cluster.sockets.iterdir())
