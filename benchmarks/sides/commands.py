"""Runs the command line as a user would, and waits for its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.sides.process import ROOT

LIMIT_S = 1200.0


def toolrl(command: str, wanted: dict[str, Any], runs_dir: Path) -> None:
    """Runs the command line."""
    file = runs_dir / f"{command}.yaml"
    file.write_text(json.dumps(wanted))  # JSON is YAML
    line = [sys.executable, "-m", "toolrl.app.cli", "--quiet", command, str(file), "--runs-dir", str(runs_dir)]
    # Ray's workers inherit it: they import the tool.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    finish(line, runs_dir / f"{command}.log", environment)


def finish(line: list[str], log: Path, environment: dict[str, str]) -> None:
    """Runs a command to its end, what it says in `log`. Raises RuntimeError with its last words where it fails."""
    with log.open("w") as said:
        process = subprocess.Popen(line, stdout=said, stderr=subprocess.STDOUT, env=environment)
        try:
            code = process.wait(LIMIT_S)
        finally:
            # As Ctrl-C would: a run that is asked to end takes its workers and containers along.
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
    if code:
        raise RuntimeError(f"{' '.join(line)} failed; {log}:\n{log.read_text()[-3000:]}")
