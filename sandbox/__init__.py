"""The code interpreter service: `SandboxPool(SandboxConfig(...))` gives sessions that run the model's Python.

Names are imported when they are first used, so that what runs inside a box can import `sandbox.inside` without the
rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox.available import available_backend
    from sandbox.config import SandboxConfig
    from sandbox.pool import SandboxPool
    from sandbox.reaper import reap
    from sandbox.result import (
        STATUSES,
        FileRefused,
        PoolExhausted,
        RunResult,
        SandboxError,
        SandboxFile,
        SandboxUnavailable,
    )
    from sandbox.session import Session
    from sandbox.stats import PoolStats

_HOMES = {
    "available_backend": "available",
    "SandboxConfig": "config",
    "PoolStats": "stats",
    "SandboxPool": "pool",
    "reap": "reaper",
    "STATUSES": "result",
    "FileRefused": "result",
    "PoolExhausted": "result",
    "RunResult": "result",
    "SandboxError": "result",
    "SandboxFile": "result",
    "SandboxUnavailable": "result",
    "Session": "session",
}

__all__ = [
    "STATUSES",
    "FileRefused",
    "PoolExhausted",
    "PoolStats",
    "RunResult",
    "SandboxConfig",
    "SandboxError",
    "SandboxFile",
    "SandboxPool",
    "SandboxUnavailable",
    "Session",
    "available_backend",
    "reap",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
