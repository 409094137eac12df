"""What this machine has, asked without importing torch or Ray."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def cpus() -> int:
    """Cores this process may use: affinity and container quota included."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _cgroup_cpus() or allowed))


def _cgroup_cpus() -> int | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def gpus() -> list[str]:
    """Names of the NVIDIA GPUs with their memory, as the driver tells them; empty without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def memory_gib() -> tuple[float, float]:
    """(total, available) of the host, the container's limit included."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) / 2**20
    total, free = fields["MemTotal"], fields["MemAvailable"]
    for limit_file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(limit_file).read_text()) / 2**30
        except (OSError, ValueError):
            continue
        total, free = min(total, limit), min(free, limit)
    return total, free


def resources() -> dict[str, float]:
    """As `toolrl.placement` wants them, for a cluster of this machine alone."""
    return {"CPU": float(cpus()), "GPU": float(len(gpus()))}
