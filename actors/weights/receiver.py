"""A worker's end of the weight channel: takes publications and gives them to its engine.

Invariants:
- Versions only rise. Of several publications that wait, the latest is applied and the others are skipped.
- An update that has begun is finished even when the caller stops waiting for it: a deadline must not leave half a
  model.
- An engine that serves an adapter takes adapters only, others whole weights only.
- On the learner's host the engine reads the learner's own memory. To another host the bytes go through Ray's object
  store, before generation pauses.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from actors.engine_errors import WeightsRefused
from actors.weights.arrivals import Arrivals
from actors.weights.publication import Publication

if TYPE_CHECKING:
    from actors.engine import Engine, UpdateTimes


class WeightReceiver:
    """One per engine, in the engine's worker."""

    def __init__(self, engine: Engine, *, fetch_deadline_s: float = 60.0) -> None:
        self.engine = engine
        self._waiting: Publication | None = None  # the latest that was asked for and is not being applied
        self._applied = ""  # checksum of the last one applied
        self.updating = asyncio.Lock()  # held by whoever gives the engine weights
        self._arrivals = Arrivals(engine.name, fetch_deadline_s)

    @property
    def version(self) -> int:
        """Of the weights that the engine has now."""
        return self.engine.version

    async def apply(self, publication: Publication) -> dict[str, Any]:
        """Brings the engine to `publication` or to a later one that came meanwhile.

        Returns {engine, version, checksum, bytes, fetch_s, prepare_s, paused_s, load_s}; times are zero when nothing was
        to do. The checksum is the publication's: the engine's process found every tensor to have it.

        Raises:
            PublicationLost; WeightsRefused (the old weights stay); UpdateFailed (no valid weights now); EngineDied.
        """
        if self._waiting is None or publication.version > self._waiting.version:
            self._waiting = publication
        return await asyncio.shield(self._apply(publication))

    async def _apply(self, asked: Publication) -> dict[str, Any]:
        async with self.updating:
            wanted, self._waiting = self._waiting or asked, None
            engine = self.engine
            times = dict.fromkeys(("fetch_s", "prepare_s", "paused_s", "load_s"), 0.0)
            if wanted.version > engine.version or (wanted.version == engine.version and not engine.has_weights):
                times = await self._swap(wanted)
                self._applied = wanted.checksum
            return {
                "engine": engine.name,
                "version": engine.version,
                "checksum": self._applied,
                "bytes": wanted.nbytes,
            } | times

    async def _swap(self, publication: Publication) -> dict[str, float]:
        begun = time.monotonic()
        async with self._arrivals.here(publication) as paths:
            fetched = time.monotonic()
            if self.engine.adapter is not None:
                spent = await self.engine.adapter.update(publication, paths)
            else:
                spent = await self._swap_all(publication, paths)
        return {
            "fetch_s": fetched - begun,
            "prepare_s": spent.prepare_s,
            "paused_s": spent.paused_s,
            "load_s": spent.load_s,
        }

    async def _swap_all(self, publication: Publication, paths: list[str]) -> UpdateTimes:
        if publication.adapter is not None:
            raise WeightsRefused(
                f"engine {self.engine.name} keeps version {self.version}: it was started without model.lora.publish=adapter "
                "and cannot serve an adapter"
            )
        payload = {"paths": paths, "tensors": [record.fields() for record in publication.tensors]}
        if self.engine.nodes is None:
            return await self.engine.update_weights(publication.version, payload)
        async with self.engine.nodes.holding(publication) as elsewhere:  # no path leads to another host's memory
            return await self.engine.update_weights(publication.version, {**payload, "elsewhere_paths": elsewhere})
