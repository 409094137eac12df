"""A worker's end of the weight channel: takes publications and gives them to its engine.

Invariants:
- Versions only rise. Of several publications that wait, the latest is applied and the others are skipped.
- An update that has begun is finished even when the caller stops waiting for it: a deadline must not leave half a
  model.
- Bytes are fetched and staged before generation pauses.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from actors.engine import Engine
from actors.weights.publication import Publication
from actors.weights.shared_memory import staged


class PublicationLost(RuntimeError):
    """The bytes are not to be had: the learner that published them is gone, or the store is too slow."""


class WeightReceiver:
    """One per engine, in the engine's worker."""

    def __init__(self, engine: Engine, *, fetch_deadline_s: float = 60.0) -> None:
        self.engine = engine
        self.fetch_deadline_s = fetch_deadline_s
        self._waiting: Publication | None = None  # the latest that was asked for and is not being applied
        self._applied = ""  # checksum of the last one applied
        self._lock = asyncio.Lock()

    @property
    def version(self) -> int:
        """Of the weights that the engine has now."""
        return self.engine.version

    async def apply(self, publication: Publication) -> dict[str, Any]:
        """Brings the engine to `publication` or to a later one that came meanwhile.

        Returns {engine, version, checksum, bytes, fetch_s, stage_s, paused_s, load_s}; times are zero when nothing was
        to do. The checksum is the publication's: the engine's process found every tensor to have it.

        Raises:
            PublicationLost; WeightsRefused (the old weights stay); UpdateFailed (no valid weights now); EngineDied.
        """
        if self._waiting is None or publication.version > self._waiting.version:
            self._waiting = publication
        return await asyncio.shield(self._apply(publication))

    async def _apply(self, asked: Publication) -> dict[str, Any]:
        async with self._lock:
            wanted, self._waiting = self._waiting or asked, None
            engine = self.engine
            times = dict.fromkeys(("fetch_s", "stage_s", "paused_s", "load_s"), 0.0)
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
        buckets = await self._fetch(publication)
        fetched = time.monotonic()
        staging = staged(buckets)
        paths = await asyncio.to_thread(staging.__enter__)
        try:
            ready = time.monotonic()
            tensors = [record.fields() for record in publication.tensors]
            payload = {"version": publication.version, "paths": paths, "tensors": tensors}
            spent = await self.engine.update_weights(publication.version, [payload])
        finally:
            staging.__exit__(None, None, None)
        return {
            "fetch_s": fetched - begun,
            "stage_s": ready - fetched,
            "paused_s": spent.paused_s,
            "load_s": spent.load_s,
        }

    async def _fetch(self, publication: Publication) -> list[np.ndarray]:
        if all(isinstance(bucket, np.ndarray) for bucket in publication.buckets):
            return list(publication.buckets)
        import ray

        try:
            # In a thread, for the deadline: a task that awaits the references holds this receiver up while they do not come.
            return await asyncio.to_thread(ray.get, list(publication.buckets), timeout=self.fetch_deadline_s)
        except ray.exceptions.RayError as error:
            raise PublicationLost(
                f"engine {self.engine.name}: the bytes of version {publication.version} are lost or did not come in "
                f"{self.fetch_deadline_s:g} s ({type(error).__name__}: {error})"
            ) from error
