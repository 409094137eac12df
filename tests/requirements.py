"""Which real components this machine has; `TOOLRL_REQUIRE=docker,vllm,ray,deepspeed` turns a skip into a failure (CI sets it)."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess

import pytest


@functools.cache
def missing(component: str) -> str | None:
    """Why `component` (docker, bubblewrap, vllm, ray, deepspeed, …) cannot be used here, or None when it can."""
    if component == "docker":
        try:
            image = os.environ.get("TOOLRL_SANDBOX_IMAGE", "toolrl-sandbox:latest")
            done = subprocess.run(["docker", "image", "inspect", image], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no Docker client: {error}"
        return None if done.returncode == 0 else f"no engine or no image {image}: {done.stderr.strip()}"
    if component == "bubblewrap":
        probe = ["bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"]
        try:
            done = subprocess.run(probe, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no bubblewrap: {error}"
        return None if done.returncode == 0 else f"bubblewrap does not work here: {done.stderr.strip()}"
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
