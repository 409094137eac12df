"""The driver's end of the weight channel: one publication to many engines, each on its own clock.

Invariants:
- `publish` returns within its deadline, whatever an engine does; who did not take the weights is named, with the
  reason.
- An engine is given one publication at a time. One that answered late is given the latest at once, without being asked
  again.
- An engine that joins is given the latest publication before `join` returns.
- What engines got over a group (`sent`) lies in no memory. It is put there, once, when an engine needs it that was not in the
  group.
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
    broke: str = ""  # why the group with the learner did not bring it, where there is one

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
    joined: bool = False


class WeightChannel:
    """Lives in one event loop. `close()` ends what still runs."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.latest: Publication | None = None
        # Puts the learner's weights of now into memory, once they are a published version.
        self.provide: Callable[[], Awaitable[Publication]] | None = None
        self.times: dict[str, float] = {}  # of the latest publication, by the names of `toolrl.monitors.known_metrics`
        self._providing = asyncio.Lock()
        self._takers: dict[str, _Taker] = {}

    async def join(self, name: str, take: Take) -> None:
        """Adds an engine and gives it the latest weights first.

        Raises:
            WeightsBehind: it did not take them; it is not added.
        """
        taker = _Taker(take)
        while self.latest is not None and taker.version != self.latest.version:  # others are published meanwhile
            publication = await self._in_memory()  # waits for a learner that trains, which is no fault of the engine's
            (await self._deliver({name: taker}, publication)).require_all()
        taker.joined = True
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

    def gauges(self) -> dict[str, float]:
        """How many engines are behind; bytes of the latest publication, their share of all weights', what it took."""
        found = {"worker/behind": float(len(self.behind)), **self.times}
        if self.latest is not None:
            found |= {"weights/bytes": float(self.latest.nbytes), "weights/share_of_merged": self.latest.share}
        return found

    async def publish(self, publication: Publication) -> Delivery:
        """Gives `publication` to every engine at once and waits for them, at most `deadline_s`."""
        self.latest = publication
        for taker in self._takers.values():
            taker.tries = 0
        return await self._deliver(self._takers, publication)

    def up_to_date(self) -> list[str]:
        """Engines with the latest weights, or with those that the run began with, and nothing under way."""
        latest = None if self.latest is None else self.latest.version
        return [
            name
            for name, taker in self._takers.items()
            if taker.version == latest and (taker.running is None or taker.running.done())
        ]

    def sent(
        self, publication: Publication, applied: Mapping[str, Mapping[str, Any]], why: Mapping[str, str]
    ) -> Delivery:
        """A version that came to the `applied` engines over a group. The others are given it now; nobody waits for them here.

        Args:
            publication: `in_memory` is False.
            why: what is known of some of those others.
        """
        delivery = Delivery(publication.version, {name: dict(report) for name, report in applied.items()})
        if self.latest is None or self.latest.version < publication.version:
            self.latest = publication
        for name, taker in self._takers.items():
            taker.tries = 0
            if name in applied:
                taker.version = publication.version
            elif taker.version != self.latest.version:
                delivery.behind[name] = why.get(name, "was not in the group; is given them through memory")
                log.warning("%s has not taken weights %d: %s", name, publication.version, delivery.behind[name])
                self._start(name, taker)
        return delivery

    async def _in_memory(self) -> Publication:
        """The latest publication, where engines can read it."""
        while True:
            async with self._providing:
                if self.latest is None:
                    raise RuntimeError("nothing was published")
                if self.latest.in_memory:
                    return self.latest
                if self.provide is None:
                    raise RuntimeError(f"weights {self.latest.version} lie in no memory")
                provided = await self.provide()
                if provided.version >= self.latest.version:
                    self.latest = provided

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
            publication = None
            try:
                publication = await self._in_memory()
                report = dict(await taker.take(publication))
            except Exception as error:
                if (
                    publication is not None and self.latest is not publication
                ):  # its learner may have overwritten the bytes
                    log.warning(
                        "%s did not take weights %d (%s); it is given the latest", name, publication.version, error
                    )
                    continue
                taker.tries += 1
                raise
            taker.tries = 0
            taker.version = int(report["version"])
            if self.latest is publication or not taker.joined:  # who joins looks for later ones without a deadline
                return report

    def close(self) -> None:
        """Stops waiting for engines that have not answered."""
        for name in list(self._takers):
            self.leave(name)
