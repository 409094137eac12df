"""The sandbox's round trip, pool and load, against a bare echo, `docker exec` and a Jupyter kernel."""

from __future__ import annotations

import os
from typing import Any

from sandbox import SandboxConfig
from sandbox.measure import measure, on_the_loop_of_actors


def run(backend: str = "auto", jupyter: str | None = os.environ.get("TOOLRL_JUPYTER_PYTHON")) -> dict[str, Any]:
    """`rows`: one figure each, with its target where there is one."""
    return {"rows": on_the_loop_of_actors(_rows(backend, jupyter))}


async def _rows(backend: str, jupyter: str | None) -> list[dict[str, Any]]:
    config = SandboxConfig(backend=backend, run=f"bench-{os.getpid()}")  # type: ignore[arg-type]
    return [
        {
            "what": figure.what,
            "p50 or value": figure.value,
            "unit": figure.unit,
            "p99": "" if figure.p99 is None else figure.p99,
            "target": figure.target,
            "met": figure.met,
        }
        async for figure in measure(config, jupyter=jupyter)
    ]
