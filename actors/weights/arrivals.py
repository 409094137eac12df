"""Where the bytes of a publication lie on this host: in the learner's memory, or in a copy that came through Ray's object store.

Invariant: the learner does not overwrite what is being read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np

from actors.weights.publication import Publication, this_node
from actors.weights.shared_memory import SlotGone, Slots, mapped, reading


class PublicationLost(RuntimeError):
    """The bytes are not to be had: their learner is gone or has overwritten them, or the network is too slow."""


class Arrivals:
    """One per reader of publications: an engine's worker, or one of its further nodes."""

    def __init__(self, name: str, fetch_deadline_s: float) -> None:
        self.name = name
        self.fetch_deadline_s = fetch_deadline_s
        self._slots = Slots()  # for bytes from another host

    @contextlib.asynccontextmanager
    async def here(self, publication: Publication) -> AsyncIterator[list[str]]:
        """Paths of the buckets in this host's memory, which stay what they are inside.

        Raises:
            PublicationLost: see the class.
        """
        if publication.node != this_node():
            buckets = await asyncio.to_thread(self._fetch, publication)
            yield await asyncio.to_thread(self._stage, buckets)
            return
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(reading(publication.head, publication.stamp))
            except SlotGone as error:
                raise self._lost(publication, error) from error
            yield list(publication.paths)

    def _fetch(self, publication: Publication) -> list[np.ndarray]:
        """From the learner's host. In a thread, for the deadline: awaiting the reference would hold the receiver up."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(publication.node, soft=False)
        task = ray.remote(num_cpus=0, scheduling_strategy=there, max_retries=0)(copied)
        try:
            buckets: list[np.ndarray] = ray.get(task.remote(publication), timeout=self.fetch_deadline_s)
        except ray.exceptions.RayError as error:
            raise self._lost(publication, getattr(error, "cause", None) or error) from error  # SlotGone there, too
        return buckets

    def _stage(self, buckets: list[np.ndarray]) -> list[str]:
        with self._slots.writing() as (slot, _):
            for index, content in enumerate(buckets):
                slot.bucket(index, content.nbytes).room(0, content.nbytes)[:] = content
        return [slot.buckets[index].path for index in range(len(buckets))]

    def _lost(self, publication: Publication, error: Exception) -> PublicationLost:
        return PublicationLost(
            f"engine {self.name}: the bytes of version {publication.version} are lost or did not come in "
            f"{self.fetch_deadline_s:g} s ({type(error).__name__}: {error})"
        )


def copied(publication: Publication) -> list[np.ndarray]:
    """The buckets, for another host; runs on the learner's."""
    with reading(publication.head, publication.stamp):
        return [mapped(path, size).copy() for path, size in zip(publication.paths, publication.sizes, strict=True)]
