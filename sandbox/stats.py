"""What a pool counts: boxes, runs by status, time, output, and what looks like an attempt to get out.

A refused system call is seen only as far as the run lets it be seen: the kernel tells nobody but the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sandbox.result import RunResult

# protocol_violation: a run wrote to the interpreter's own pipe. refused: a run ended with a PermissionError, as a system call
# or a path that is closed to it gives. malformed_answer: a box answered what no warden sends.
Suspicion = Literal["protocol_violation", "refused", "malformed_answer"]
_REFUSALS = ("PermissionError", "OSError: [Errno 1]")


@dataclass
class PoolStats:
    """Counters since the pool was opened, and what it holds now."""

    backend: str = ""
    idle: int = 0
    in_use: int = 0
    resetting: int = 0
    creating: int = 0
    waiting: int = 0
    created: int = 0
    create_failures: int = 0
    destroyed: int = 0
    unclean: int = 0  # boxes that a reset could not make as new
    acquired: int = 0
    runs: dict[str, int] = field(default_factory=dict)  # by status
    queue_s: float = 0.0  # sums over the runs, as are the next three
    wall_s: float = 0.0
    cpu_s: float = 0.0
    output_bytes: int = 0
    suspicions: dict[str, int] = field(default_factory=dict)

    def count(self, result: RunResult) -> None:
        """One more run."""
        self.runs[result.status] = self.runs.get(result.status, 0) + 1
        self.queue_s += result.queue_s
        self.wall_s += result.wall_s
        self.cpu_s += result.cpu_s
        self.output_bytes += result.stdout_bytes + result.stderr_bytes
        if result.status == "protocol_violation":
            self.suspect("protocol_violation")
        elif result.status == "error" and result.stderr.rstrip().rpartition("\n")[2].startswith(_REFUSALS):
            self.suspect("refused")

    def suspect(self, what: Suspicion) -> None:
        """Something that honest code does not do."""
        self.suspicions[what] = self.suspicions.get(what, 0) + 1

    def copy(self, **changes: int) -> PoolStats:
        """A copy that counts on by itself, with these values in place of its own."""
        own = {"runs": dict(self.runs), "suspicions": dict(self.suspicions)}
        return PoolStats(**{**vars(self), **own, **changes})
