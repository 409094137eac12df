"""One side in a process of its own, told by its parent what to do: a JSON object a line in, one a line out.

The first answer is `{}`: the side is up. `{"case": …}` makes it ready for a case, then each `{"do": WORK}` is one timed piece
of work. A side that takes its turn while the others wait shares the machine's good and bad minutes with them, and what it
needs of memory is its own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Side:
    """The parent's end. Raises RuntimeError with what the process said where it ends early."""

    def __init__(self, module: str, *arguments: str, python: str = sys.executable, threads: int = 1) -> None:
        self.name = module
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `stop`
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(ROOT),
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
        self._process = subprocess.Popen(
            # -P: no file of the current folder may hide a package of its name.
            [python, "-P", "-m", f"benchmarks.sides.{module}", *arguments],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )

    def wait_until_up(self) -> None:
        self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it said is read below
        return self._answer()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._said.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._said.seek(0)
            raise RuntimeError(
                f"the side {self.name!r} ended with {self._process.returncode}:\n{self._said.read()[-3000:]}"
            )
        found: dict[str, Any] = json.loads(line)
        return found


class Channel:
    """The side's end. What libraries print goes to standard error from here on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.answer()

    def requests(self) -> Iterator[dict[str, Any]]:
        """Until the parent closes its end."""
        for line in iter(sys.stdin.readline, ""):
            yield json.loads(line)

    def answer(self, **found: Any) -> None:
        self._out.write(json.dumps(found) + "\n")
        self._out.flush()


class Meter:
    """Seconds of this process's processor, and the most memory it held beyond what it held at the meter's start."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what an earlier case gave back must not serve this one
        self._base = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        self._started = 0.0

    def start(self) -> None:
        self._started = time.process_time()

    def read(self) -> dict[str, float]:
        """`seconds` since `start`, `peak_mib` since the meter was made."""
        return {
            "seconds": time.process_time() - self._started,
            "peak_mib": max(0, _status("VmHWM") - self._base) / 1024,
        }


def _status(name: str) -> int:
    """KiB, of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"this system's /proc/self/status has no {name}; the benchmark needs Linux")
