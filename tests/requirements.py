"""Which real components this machine has; `TOOLRL_REQUIRE=docker,vllm,ray,deepspeed` turns a skip into a failure (CI sets it)."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / ".tools" / "bin"  # of `make tools`
_PROGRAMS = {"shellcheck", "sshd", "hadolint", "kubernetes-validate", "docker-compose", "kubectl"}


def tool(program: str) -> str | None:
    """Where it is, in .tools or in the path; None where it is not."""
    return shutil.which(program, path=f"{TOOLS}:{os.environ['PATH']}:/usr/sbin")


@functools.cache
def missing(component: str) -> str | None:
    """Why `component` (docker, runsc, bubblewrap, netns, shellcheck, vllm, ray, …) cannot be used here, or None when it can."""
    if component == "docker":
        try:
            image = os.environ.get("TOOLRL_SANDBOX_IMAGE", "toolrl-sandbox:latest")
            done = subprocess.run(["docker", "image", "inspect", image], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no Docker client: {error}"
        return None if done.returncode == 0 else f"no engine or no image {image}: {done.stderr.strip()}"
    if component == "runsc":
        try:
            done = subprocess.run(
                ["docker", "info", "--format", "{{json .Runtimes}}"], capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no Docker client: {error}"
        return None if '"runsc"' in done.stdout else "the Docker engine has no runtime runsc"
    if component == "bubblewrap":
        probe = ["bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"]
        try:
            done = subprocess.run(probe, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no bubblewrap: {error}"
        return None if done.returncode == 0 else f"bubblewrap does not work here: {done.stderr.strip()}"
    if component == "netns":
        probe = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
        try:
            done = subprocess.run(probe, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no network namespaces: {error}"
        return None if done.returncode == 0 else f"network namespaces do not work here: {done.stderr.strip()}"
    if component == "slurm":
        programs = ("munged", "slurmctld", "slurmd", "sbatch")
        lacking = [name for name in programs if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]
        return f"there is no {', '.join(lacking)}" if lacking else None
    if component in _PROGRAMS:
        return None if tool(component) else f"there is no {component} (`make tools`, or your system's packages)"
    return None if importlib.util.find_spec(component) else f"the module {component} is not installed"


def need(*components: str) -> None:
    """Skip the calling test (or module) where a component is missing; fail instead where TOOLRL_REQUIRE names it."""
    required = {name.strip() for name in os.environ.get("TOOLRL_REQUIRE", "").split(",") if name.strip()}
    for component in components:
        why = missing(component)
        if why is None:
            continue
        if component in required:
            pytest.fail(f"{component} is required here (TOOLRL_REQUIRE) but {why}", pytrace=False)
        pytest.skip(why, allow_module_level=True)
