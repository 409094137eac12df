"""The environment that TRL runs in: its own, because it needs accelerate and other things that toolrl's does not have.

It is made once and kept in the user's cache; `toolrl bench NAME --trl PYTHON` uses another that has TRL 1.16.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

VERSION = "1.16.0"
MADE_IN_S = 900


def trl_python(given: str | None) -> str:
    """The Python of an environment with TRL.

    Raises:
        RuntimeError: the one given has no TRL 1.16, or none could be made.
    """
    python = Path(given) if given else _cached() / "bin" / "python"
    if given is None and not _version(python):
        _make(_cached())
    found = _version(python)
    if found != VERSION:
        raise RuntimeError(
            f"{python} has {'TRL ' + found if found else 'no TRL'}; the benchmark compares with TRL {VERSION}"
        )
    return str(python)


def _cached() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "toolrl" / f"trl-{VERSION}"


def _version(python: Path) -> str:
    """TRL's version there, empty without it."""
    if not python.is_file():
        return ""
    ask = "import importlib.metadata as m; print(m.version('trl')); import accelerate"
    done = subprocess.run([python, "-P", "-c", ask], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _make(folder: Path) -> None:
    """torch and transformers of this environment's versions first, so that both sides run the same ones."""
    ours = {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "transformers")}
    steps = [
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin/pip"), "install", "-q", f"torch=={ours['torch']}"],
        [str(folder / "bin/pip"), "install", "-q", f"trl=={VERSION}", f"transformers=={ours['transformers']}"],
    ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, timeout=MADE_IN_S)
        if done.returncode:
            raise RuntimeError(f"an environment for TRL could not be made: {' '.join(step)}\n{done.stderr[-2000:]}")
