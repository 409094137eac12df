"""A worker's end of the weight channel: takes publications and gives them to its engine.

Invariants:
- Versions only rise. Of several publications that wait, the latest is applied and the others are skipped.
- An update that has begun is finished even when the caller stops waiting for it: a deadline must not leave half a model.
- Bytes are fetched and staged before generation pauses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from actors.engine import Engine
from actors.weights.publication import Publication
from actors.weights.shared_memory import staged


class PublicationLost(RuntimeError):
    """The bytes are no longer to be had: the learner that published them is gone, or a newer version replaced them."""


class WeightReceiver:
    """One per engine, in the engine's worker."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._latest: Publication | None = None
        self._lock = asyncio.Lock()

    @property
    def version(self) -> int:
        """Of the weights that the engine has now."""
        return self.engine.version

    async def apply(self, publication: Publication) -> dict[str, Any]:
        """Brings the engine to `publication` or to a later one that came meanwhile.

        Returns {engine, version, checksum, bytes, fetch_s, stage_s, paused_s, load_s}; times are zero when nothing was to do.

        Raises:
            PublicationLost; WeightsRefused (the old weights stay); UpdateFailed (no valid weights now); EngineDied.
        """
        if self._latest is None or publication.version > self._latest.version:
            self._latest = publication
        return await asyncio.shield(self._apply(publication))

    async def _apply(self, asked: Publication) -> dict[str, Any]:
        async with self._lock:
            wanted = self._latest if self._latest is not None else asked
            times = dict.fromkeys(("fetch_s", "stage_s", "paused_s", "load_s"), 0.0)
            if not self.engine.has_weights or wanted.version > self.engine.version:
                try:
                    times = await self._swap(wanted)
                except BaseException:
                    if self._latest is wanted:
                        self._latest = None  # the next one, or the same again, is tried afresh
                    raise
            report: dict[str, Any] = {"engine": self.engine.name, "version": self.engine.version}
            checksum = wanted.checksum if wanted.version == self.engine.version else ""
            return report | {"checksum": checksum, "bytes": wanted.nbytes} | times

    async def _swap(self, publication: Publication) -> dict[str, float]:
        begun = time.monotonic()
        buckets = await self._fetch(publication)
        fetched = time.monotonic()
        records = [[r.name, r.dtype, list(r.shape), r.bucket, r.offset, r.nbytes, r.checksum] for r in publication.tensors]
        staging = staged(buckets)
        paths = await asyncio.to_thread(staging.__enter__)
        try:
            done = time.monotonic()
            payload = {"version": publication.version, "paths": paths, "tensors": records}
            spent = await self.engine.update_weights(publication.version, [payload])
        finally:
            staging.__exit__(None, None, None)
        return {
            "fetch_s": fetched - begun,
            "stage_s": done - fetched,
            "paused_s": spent.paused_s,
            "load_s": spent.load_s,
        }

    async def _fetch(self, publication: Publication) -> list[np.ndarray]:
        arrays = []
        for bucket in publication.buckets:
            if isinstance(bucket, np.ndarray):
                arrays.append(bucket)
                continue
            from ray.exceptions import RayError

            try:
                arrays.append(await bucket)
            except RayError as error:
                raise PublicationLost(
                    f"engine {self.engine.name}: the bytes of version {publication.version} are lost ({error})"
                ) from error
        return arrays

    async def step(self, name: str, argument: Mapping[str, Any] | int | None = None) -> None:
        """One step of an update that a trainer drives itself, through vLLM's `nccl` or `ipc` (`actors.weights.trainer_driven`).

        `init` takes the connection's settings, `update` a payload, `finish` the new version.
        """
        await self.engine.trainer_step(name, argument)
