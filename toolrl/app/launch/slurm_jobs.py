"""`python -m toolrl.app.launch.slurm_jobs follow|state|stop JOB …`, in the folder that the job was submitted from.

The job's script writes the run's exit code into `exit-code`; `follow` prints what the job prints and ends with that code.
A job that Slurm put back is followed until it has run again.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

EXIT_CODE = Path("exit-code")
LOOK_EVERY_S = 0.5
ASK_EVERY_S = 3.0  # Slurm's controller is asked by many
STOP_DEADLINE_S = 600.0
SILENCE_DEADLINE_S = 300.0  # of a controller that does not answer

ENDED = [
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
]
FORGOTTEN = "FORGOTTEN"  # ended so long ago that Slurm knows nothing of it


class Silent(Exception):
    """Slurm's controller does not answer; its words."""


def follow(job: str, log: str) -> int:
    """The run's exit code; 1 where it never had one."""
    shown = 0
    asked = -ASK_EVERY_S
    answered = time.monotonic()
    ended = False
    while not ended:
        if time.monotonic() - asked >= ASK_EVERY_S:
            asked = time.monotonic()
            try:
                ended = _has_ended(job)
                answered = asked
            except Silent as error:
                if asked - answered > SILENCE_DEADLINE_S:
                    print(f"Slurm does not answer: {error}", file=sys.stderr)
                    return 1
        shown = _show(Path(log), shown)  # once more after the end: what was written until then
        if not ended:
            time.sleep(LOOK_EVERY_S)
    if EXIT_CODE.is_file():
        return int(EXIT_CODE.read_text())
    print(f"job {job} ended without an exit code of the run; Slurm says {_state(job)}", file=sys.stderr)
    return 1


def state(job: str) -> int:
    try:
        for name, ran, where in _components(job):
            print(name, ran, where)
    except Silent as error:
        print(f"Slurm does not answer: {error}", file=sys.stderr)
        return 1
    return 0


def stop(job: str) -> int:
    """Slurm sends TERM to the job's script, and the run writes a checkpoint; returns when the job has ended."""
    ends = time.monotonic() + STOP_DEADLINE_S
    try:
        if _state(job) in ("PENDING", "CONFIGURING"):
            _run("scancel", job)
        elif not _has_ended(job):
            _run("scancel", "--signal=TERM", "--batch", job)
        while not _has_ended(job):
            if time.monotonic() > ends:
                print(f"job {job} has not ended in {STOP_DEADLINE_S:g} s", file=sys.stderr)
                return 1
            time.sleep(LOOK_EVERY_S)
    except Silent as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _has_ended(job: str) -> bool:
    return _state(job) in (*ENDED, FORGOTTEN)


def _state(job: str) -> str:
    """Of its first component, on which the script runs. Raises Silent."""
    found = _components(job)
    return found[0][0] if found else FORGOTTEN


def _components(job: str) -> list[tuple[str, str, str]]:
    """(state, how long it ran, where or why not) of each component, the first one first. Raises Silent."""
    words = ["squeue", "--noheader", "--states=all", f"--job={job}", "--sort=i", "--format=%T|%M|%R"]
    try:
        lines = _run(*words).splitlines()
    except Silent as error:
        if "Invalid job id" in str(error):
            return []
        raise
    parts = [line.strip().split("|", 2) for line in lines if line.strip()]
    return [(name, ran, where) for name, ran, where in parts]


def _show(log: Path, shown: int) -> int:
    """Prints what the log says after so many bytes; how many there are now."""
    if not log.is_file():
        return shown
    with log.open("rb") as file:
        file.seek(shown)
        new = file.read()
    sys.stdout.buffer.write(new)
    sys.stdout.buffer.flush()
    return shown + len(new)


def _run(*words: str) -> str:
    """What one of Slurm's commands prints. Raises Silent."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Silent(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


_COMMANDS: dict[str, Callable[..., int]] = {"follow": follow, "state": state, "stop": stop}

if __name__ == "__main__":
    sys.exit(_COMMANDS[sys.argv[1]](*sys.argv[2:]))
