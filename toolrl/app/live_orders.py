"""What a live run can be told: orders by name, for `toolrl.app.control`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from actors.worker_scaling import WorkerScaling
from toolrl.app.control import Order, Say
from toolrl.app.parts import Parts
from toolrl.app.pausing import Pausing


def orders(parts: Parts, pausing: Pausing) -> dict[str, Order]:
    """The orders of this run."""
    workers = WorkerScaling(parts.workers)

    async def scale(asked: Mapping[str, Any], say: Say) -> dict[str, Any]:
        scaled = await workers.to(int(asked["rollout_workers"]), say)
        # What a later `--resume` starts with.
        await asyncio.to_thread(parts.folder.keep_workers, parts.workers.wanted)
        return asdict(scaled)

    async def go_on(asked: Mapping[str, Any], say: Say) -> str:
        return pausing.go_on(roll_back=bool(asked["roll_back"]))

    async def stop(asked: Mapping[str, Any], say: Say) -> bool:
        return pausing.stop()

    return {"scale": scale, "continue": go_on, "stop": stop}
