"""The driver's end of the weight channel: one publication to many engines, each on its own clock.

Invariants:
- `publish` returns within its deadline, whatever an engine does; who did not take the weights is named, with the
  reason.
- An engine is given one publication at a time. One that answered late is given the latest at once, without being asked
  again.
- An engine that joins is given the latest publication before `join` returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.weights.publication import Publication

log = logging.getLogger(__name__)

TRIES = 3  # of one publication on one engine

# Gives one publication to one engine and returns the receiver's report, e.g. a call of a rollout worker's
# `update_weights`.
Take = Callable[[Publication], Awaitable[Mapping[str, Any]]]


class WeightsBehind(RuntimeError):
    """Engines did not take a version in time. The message names them and says why."""


@dataclass
class Delivery:
    """What became of one publication."""

    version: int
    applied: dict[str, dict[str, Any]] = field(default_factory=dict)  # engine -> its receiver's report
    behind: dict[str, str] = field(default_factory=dict)  # engine -> why

    def require_all(self) -> Delivery:
        """Raises WeightsBehind when any engine is behind."""
        if self.behind:
            reasons = "; ".join(f"{name}: {why}" for name, why in sorted(self.behind.items()))
            raise WeightsBehind(f"weights {self.version} were not taken by {len(self.behind)} engines: {reasons}")
        return self


@dataclass
class _Taker:
    take: Take
    version: int | None = None
    running: asyncio.Task[dict[str, Any]] | None = None
    tries: int = 0  # of the latest publication that ended in an error


class WeightChannel:
    """Lives in one event loop. `close()` ends what still runs."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.latest: Publication | None = None
        self._takers: dict[str, _Taker] = {}

    async def join(self, name: str, take: Take) -> None:
        """Adds an engine and gives it the latest weights first.

        Raises:
            WeightsBehind: it did not take them; it is not added.
        """
        taker = _Taker(take)
        if self.latest is not None:
            delivery = await self._deliver({name: taker}, self.latest)
            delivery.require_all()
        self._takers[name] = taker

    def leave(self, name: str) -> None:
        """Forgets an engine; what it still does with its last publication is its own affair."""
        taker = self._takers.pop(name, None)
        if taker is not None and taker.running is not None:
            taker.running.cancel()

    @property
    def behind(self) -> dict[str, int | None]:
        """{engine: the version it has, as far as is known} for those without the latest."""
        latest = self.latest.version if self.latest is not None else None
        return {name: taker.version for name, taker in self._takers.items() if latest and taker.version != latest}

    async def publish(self, publication: Publication) -> Delivery:
        """Gives `publication` to every engine at once and waits for them, at most `deadline_s`."""
        self.latest = publication
        for taker in self._takers.values():
            taker.tries = 0
        return await self._deliver(self._takers, publication)

    def retry(self) -> list[str]:
        """Gives the latest publication again to engines whose last try ended in an error, at most `TRIES` times in all.

        Without it an engine that erred once would wait for the next publication, which may be waiting for that engine's
        samples. Returns the engines; does not wait for them.
        """
        again = [
            name
            for name, taker in self._takers.items()
            if name in self.behind and taker.running is not None and taker.running.done() and taker.tries < TRIES
        ]
        for name in again:
            log.warning("%s is given the latest weights again (try %d)", name, self._takers[name].tries + 1)
            self._start(name, self._takers[name])
        return again

    async def _deliver(self, takers: Mapping[str, _Taker], publication: Publication) -> Delivery:
        delivery = Delivery(publication.version)
        tasks = {name: self._start(name, taker) for name, taker in takers.items()}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=self.deadline_s)
        for name, task in tasks.items():
            if not task.done():
                delivery.behind[name] = f"no answer in {self.deadline_s:g} s"
            elif task.cancelled():
                delivery.behind[name] = "left"
            elif (error := task.exception()) is not None:
                delivery.behind[name] = f"{type(error).__name__}: {error}"
            else:
                delivery.applied[name] = task.result()
        for name, why in delivery.behind.items():
            log.warning("%s has not taken weights %d: %s", name, publication.version, why)
        return delivery

    def _start(self, name: str, taker: _Taker) -> asyncio.Task[dict[str, Any]]:
        """The task that brings `taker` to the latest version; one that still runs does so when it comes to an end."""
        if taker.running is None or taker.running.done():
            taker.running = asyncio.create_task(self._bring_up(name, taker), name=f"weights to {name}")
            taker.running.add_done_callback(lambda task: task.cancelled() or task.exception())
        return taker.running

    async def _bring_up(self, name: str, taker: _Taker) -> dict[str, Any]:
        while True:
            publication = self.latest
            if publication is None:
                raise RuntimeError("nothing was published")
            try:
                report = dict(await taker.take(publication))
            except Exception:
                taker.tries += 1
                raise
            taker.tries = 0
            taker.version = int(report["version"])
            if self.latest is publication:
                return report

    def close(self) -> None:
        """Stops waiting for engines that have not answered."""
        for name in list(self._takers):
            self.leave(name)
