"""Removes containers that their owner left behind: its process is dead on this machine, or their lease is over.

The last of three layers: a box ends with its stream, a box ends after a long silence, and this. It never touches a
container without our label, of another run when one is named, or of an owner that lives and whose lease runs.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import docker.errors

from sandbox import labels
from sandbox.docker_backend import connect
from sandbox.owner import is_gone


@dataclass(frozen=True, slots=True)
class FoundBox:
    """A container of the sandbox, whoever made it. `orphan` says why it may be removed, or is empty."""

    id: str
    run: str
    owner: str
    state: str
    age_s: float
    orphan: str


def _orphan_reason(found: dict[str, str], now: float) -> str:
    if is_gone(found.get(labels.OWNER, "")):
        return "its owner is dead"
    expires = found.get(labels.EXPIRES, "")
    return "its lease is over" if expires.isdigit() and int(expires) < now else ""


def list_boxes(run: str | None = None) -> list[FoundBox]:
    """Every container of the sandbox on this engine, of one run or of all. Blocking. Raises SandboxUnavailable."""
    api = connect(timeout_s=30)
    try:
        wanted = [f"{labels.BOX}=1"] + ([f"{labels.RUN}={run}"] if run is not None else [])
        now = time.time()
        return [
            FoundBox(
                id=entry["Id"],
                run=entry["Labels"].get(labels.RUN, ""),
                owner=entry["Labels"].get(labels.OWNER, ""),
                state=entry["State"],
                age_s=now - entry["Created"],
                orphan=_orphan_reason(entry["Labels"], now),
            )
            for entry in api.containers(all=True, filters={"label": wanted})
        ]
    finally:
        api.close()


def reap(run: str | None = None) -> list[FoundBox]:
    """Remove orphans, of one run or of all; returns them. Blocking. Raises SandboxUnavailable."""
    orphans = [box for box in list_boxes(run) if box.orphan]
    api = connect(timeout_s=30)
    try:
        for box in orphans:
            with contextlib.suppress(docker.errors.APIError):  # already on its way out
                api.remove_container(box.id, force=True, v=True)
    finally:
        api.close()
    return orphans
