"""A Docker engine of a test's own: its data, sockets and containers in a temporary folder, to be killed and started at will.

The machine's engine is only read from (the image is copied out of it), and its network is out of reach.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

READY_S = 60.0


class OwnEngine:
    """`start()`, `kill()` (SIGKILL, as a crash), `stop()`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/docker.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        # In a network namespace of its own: with --bridge=none an engine deletes the docker0 that it finds, and without it
        # takes it over; on the machine's network that would be the one of the machine's engine.
        command = ["unshare", "--net", "dockerd", "-H", self.host, "--pidfile", f"{self.folder}/docker.pid"]
        command += ["--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec"]
        command += ["--bridge=none", "--iptables=false", "--ip6tables=false"]
        (self.folder / "docker.pid").unlink(missing_ok=True)  # what a crash leaves
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + READY_S
        while self.docker("version").returncode != 0:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no second engine: {(self.folder / 'log').read_text()[-1500:]}")
            time.sleep(0.1)

    def docker(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["docker", "-H", self.host, *arguments], capture_output=True, text=True, timeout=120)

    def load(self, image: str) -> None:
        """Copies an image of the machine's engine."""
        save = subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE)
        load = subprocess.run(["docker", "-H", self.host, "load"], stdin=save.stdout, capture_output=True, timeout=240)
        assert save.wait() == 0 and load.returncode == 0, load.stderr.decode()

    def running(self) -> list[str]:
        """Containers with a live process."""
        return self.docker("ps", "-q").stdout.split()

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=60)


def _mounts_below(folder: Path) -> list[str]:
    with open("/proc/self/mounts") as mounts:
        points = [line.split()[1] for line in mounts]
    return sorted((point for point in points if point.startswith(f"{folder}/")), reverse=True)


@contextlib.contextmanager
def own_engine(image: str) -> Iterator[OwnEngine]:
    """An engine that has the image. Skips the test where a second engine cannot run; leaves nothing behind."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("a second Docker engine needs root and dockerd")
    folder = Path(tempfile.mkdtemp(prefix="engine-"))
    engine = OwnEngine(folder)
    try:
        engine.start()
        engine.load(image)
        yield engine
    finally:
        engine.stop()
        for point in _mounts_below(folder):
            subprocess.run(["umount", point], capture_output=True)
        if not _mounts_below(folder):  # never through a mount
            shutil.rmtree(folder, ignore_errors=True)
