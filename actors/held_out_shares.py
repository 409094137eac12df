"""Held-out tasks spread over a run's rollout workers: each share is played by the first of them that can, and where they died
by the one that takes their place."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError

from toolrl.config import RunConfig

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1


class NotPlayed(Exception):
    """No worker could play a share; the message says why."""


class Plays(Protocol):
    """A worker at work."""

    actor: Any
    info: dict[str, Any]


async def play_shares(
    members: Mapping[str, Plays],
    tasks: int,
    samples: int,
    temperature: float,
    settings: RunConfig | None,
    *,
    deadline_s: float,
    patience_s: float,
) -> list[bytes]:
    """Plays the first `tasks` held-out tasks, `samples` times each; returns encoded trajectories.

    Args:
        members: of the pool, as it is at any moment.
        settings: see `WorkerPool.evaluate`.
        deadline_s: a worker that has not played its share by then is given up.
        patience_s: how long a share waits for a replacement once all who could play it have died; 0 where nobody replaces them.

    Raises:
        NotPlayed: no worker could play one of the shares.
    """
    shares = max(len(members), 1)

    async def share(index: int) -> list[bytes]:
        work = (list(range(index, tasks, shares)), samples, temperature, settings)
        return await _play(members, index, work, deadline_s, patience_s)

    batches = await asyncio.gather(*(share(index) for index in range(min(shares, tasks))))
    return [each for batch in batches for each in batch]


async def _play(
    members: Mapping[str, Plays], first: int, work: tuple[Any, ...], deadline_s: float, patience_s: float
) -> list[bytes]:
    """One share; `first`: which of the workers is asked first."""
    tried: list[Plays] = []
    why, patient = "no rollout worker is left", True
    until = time.monotonic() + patience_s
    while True:
        there = list(members.values())
        left = [each for each in there[first:] + there[:first] if not any(each is other for other in tried)]
        if left:
            tried.append(left[0])
            try:
                return await _asked(left[0].actor, work, deadline_s)
            except (RayError, TimeoutError) as error:  # it died, or its engine did or hangs: its peers play its share
                why = f"the last to try was {left[0].info.get('worker')}: {getattr(error, 'cause', None) or error}"
                log.warning("held-out tasks are given to another rollout worker; %s", why)
                patient = isinstance(error, RayActorError)  # it will be replaced; one that lives and fails will not
        elif patient and time.monotonic() < until:
            await asyncio.sleep(LOOK_EVERY_S)
        else:
            raise NotPlayed(f"no rollout worker could play the held-out tasks; {why}")


async def _asked(actor: Any, work: tuple[Any, ...], deadline_s: float) -> list[bytes]:
    asked = actor.evaluate.remote(*work)
    try:
        played: list[bytes] = await asyncio.wait_for(_value(asked), deadline_s)
    except TimeoutError as error:
        if isinstance(error, RayError):  # one of the worker's own
            raise
        ray.cancel(asked)
        raise TimeoutError(f"its share was not played after loop.eval_deadline_s={deadline_s:g}") from error
    return played


async def _value(ref: Any) -> Any:
    return await ref
