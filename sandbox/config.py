"""Settings of a pool, checked when they are made."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

BackendName = Literal["auto", "docker", "process"]


@dataclass(frozen=True)
class SandboxConfig:
    """Sizes and deadlines of a pool and of each of its boxes. Raises ValueError for values that cannot work."""

    backend: BackendName = "auto"  # auto: docker where an engine answers and the image is there, else process
    image: str = "toolrl-sandbox:latest"
    runtime: str = "runc"  # docker: or runsc, or what else the engine knows
    # process: bubblewrap where it works and else a plain subprocess, bubblewrap or nothing, or a plain subprocess on
    # purpose.
    confinement: Literal["auto", "bubblewrap", "none"] = "auto"
    min_sessions: int = 2  # boxes kept warm
    max_sessions: int = 32  # boxes at most
    idle_s: float = 300.0  # a box beyond the minimum that nobody wanted for so long ends
    max_concurrent_runs: int = 0  # cells that run at once; 0: twice the cores, at least 4
    max_waiters: int = 1024  # acquires that may wait for a box
    acquire_deadline_s: float = 120.0
    timeout_s: float = 10.0  # of a run that names none
    grace_s: float = 2.0  # what the host adds to a run's deadline before it removes the box
    uses_per_box: int = 500  # episodes after which a box is replaced
    preimport: tuple[str, ...] = ()  # modules every interpreter has loaded from the start
    memory_mib: int = 512  # docker: of the whole box; process: of each process
    work_mib: int = 128  # size of the work folder; docker: counts as memory
    tmp_mib: int = 64
    inodes: int = 16384  # files in each of them
    pids: int = 64
    cpus: float = 1.0  # docker only
    max_output_bytes: int = 65536  # shown of each stream and of the echoed value
    output_limit_bytes: int = 16 * 2**20  # printing more than this ends the run
    max_code_bytes: int = 2**20
    max_file_bytes: int = 16 * 2**20
    ttl_s: float = 600.0  # a box that hears nothing from its owner for so long ends itself
    lease_s: float = 6 * 3600.0  # age at which a reaper may take a box even from a living owner
    create_deadline_s: float = 30.0
    breaker_failures: int = 4  # creations that fail in a row before the pool refuses at once …
    breaker_cooldown_s: float = 10.0  # … for so long
    run: str = "default"  # label: boxes of one run are reaped together
    labels: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "preimport", tuple(self.preimport))
        if self.backend not in ("auto", "docker", "process"):
            raise ValueError(f"backend {self.backend!r} is none of auto, docker, process")
        if self.confinement not in ("auto", "bubblewrap", "none"):
            raise ValueError(f"confinement {self.confinement!r} is none of auto, bubblewrap, none")
        if not 0 <= self.min_sessions <= self.max_sessions or self.max_sessions < 1:
            raise ValueError(
                f"min_sessions {self.min_sessions} and max_sessions {self.max_sessions} do not fit together"
            )
        for name in (
            "timeout_s",
            "grace_s",
            "acquire_deadline_s",
            "ttl_s",
            "idle_s",
            "lease_s",
            "create_deadline_s",
            "cpus",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("memory_mib", "work_mib", "tmp_mib", "pids", "uses_per_box", "max_output_bytes", "max_code_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.output_limit_bytes < self.max_output_bytes:
            raise ValueError("output_limit_bytes is below max_output_bytes")

    @property
    def concurrent_runs(self) -> int:
        """Cells that may run at once on this machine."""
        return self.max_concurrent_runs or max(2 * (os.cpu_count() or 1), 4)

    def box_settings(self) -> dict[str, Any]:
        """What a box is told in the first frame."""
        return {
            "max_output_bytes": self.max_output_bytes,
            "output_limit_bytes": self.output_limit_bytes,
            "max_file_bytes": self.max_file_bytes,
            "ttl_s": self.ttl_s,
            "preimport": list(self.preimport),
            "memory_mib": self.memory_mib,
            "address_space_mib": self.memory_mib * 3 // 4 if self.runtime == "runsc" else 0,
            "work_mib": self.work_mib,
            "pids": self.pids,
        }
