"""A run's Ray: a busy machine gets more than one try, and an address at which nothing answers is told within seconds."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from tests.requirements import need

need("ray")

import ray

from toolrl import presets
from toolrl.app import ray_start
from toolrl.app.ray_start import TRIES, start_ray
from toolrl.errors import RunError, UserError

LATE = "The current node timed out during startup."


class Late:
    """In place of `ray.init`: starts a process, and comes too late so many times; then Ray itself."""

    def __init__(self, times: int) -> None:
        self.times, self.processes, self.init = times, list[psutil.Process](), ray.init

    def __call__(self, **arguments: Any) -> Any:
        if len(self.processes) == self.times:
            return self.init(**arguments)
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        self.processes.append(psutil.Process(started.pid))
        raise Exception(LATE)


def test_a_local_start_that_comes_late_is_tried_again_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(1)
    monkeypatch.setattr(ray_start.ray, "init", late)
    try:
        start_ray(presets.load("quickstart-cpu"))
        assert ray.cluster_resources()["CPU"] >= 3
    finally:
        ray.shutdown()
    assert not late.processes[0].is_running()


def test_after_the_last_try_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(TRIES)
    monkeypatch.setattr(ray_start.ray, "init", late)
    with pytest.raises(RunError, match=f"did not start on this machine in {TRIES} tries: {LATE} Load average"):
        start_ray(presets.load("quickstart-cpu"))
    assert not any(process.is_running() for process in late.processes)


def test_an_address_at_which_nothing_answers_is_told_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listening
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(UserError, match=f"ray_address={address}: no Ray cluster answers there .*ray start --head"):
            start_ray(presets.load("quickstart-cpu", [f"placement.ray_address={address}"]))
    assert time.monotonic() - started < 10


def test_auto_without_a_cluster_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_there(**_: Any) -> None:  # another test's may be
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray_start.ray, "init", none_there)
    with pytest.raises(UserError, match=r"ray_address=auto: Could not find any running Ray instance.*ray start --head"):
        start_ray(presets.load("quickstart-cpu", ["placement.ray_address=auto"]))
