"""The learner's end of the transport `gloo`: the same methods as vLLM's trainer engines, without vLLM."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from actors.weights.buckets import DIGEST_BYTES, cut, described, filled
from actors.weights.engine_client import EngineClient
from actors.weights.gloo_group import GlooGroup, GroupBroken, open_meeting
from actors.weights.publication import TensorRecord

ANSWER_S = 5.0  # for the engines' own words about a group that broke


@dataclass(frozen=True)
class GlooSettings:
    """What rank 0 forms a group with."""

    address: str  # of this host
    bucket_bytes: int
    checksum: bool


class GlooSender:
    """`form` a group with the client's engines, then `send_weights` for as long as it holds. On rank 0 alone."""

    def __init__(self, group: GlooGroup, client: EngineClient, source: Any, settings: GlooSettings) -> None:
        self._group = group
        self._client = client
        self._source = source
        self._settings = settings
        self._memory: list[torch.Tensor] = []  # two buckets, kept

    @classmethod
    def form(cls, client: EngineClient, source: Any, settings: GlooSettings) -> GlooSender:
        """Raises GroupBroken or WeightsBehind; no group is left."""
        left_s = client.left_s()
        store, port = open_meeting(settings.address, left_s)
        size = 1 + len(client.workers) * client.ranks_per_engine
        place = {"address": settings.address, "port": port, "rank_offset": 1, "size": size, "deadline_s": left_s}
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as threads:
            told = threads.submit(client.init_weight_transfer_engine, place)
            try:
                group = GlooGroup(store, rank=0, size=size, here=settings.address, deadline_s=left_s)
            except GroupBroken as error:
                raise _with_names(error, client, told) from error
            told.result()
        return cls(group, client, source, settings)

    def send_weights(self) -> None:
        """Raises GroupBroken or WeightsBehind: the group is of no use any more."""
        client, settings = self._client, self._settings
        records = described(self._source.metadata())
        payload = {
            "step": "prepare",
            "version": client.version,
            "tensors": [record.fields() for record in records],
            "bucket_bytes": settings.bucket_bytes,
            "within_s": client.left_s(),
        }
        client.start_weight_update()
        threads = ThreadPoolExecutor(1, thread_name_prefix="weights")
        taken = threads.submit(client.update_weights, payload)
        try:
            self._send(records)
            taken.result()
        except GroupBroken as error:
            self.shutdown()
            raise _with_names(error, client, taken) from error
        finally:
            threads.shutdown(wait=False)
        client.finish_weight_update()

    def _send(self, records: Sequence[TensorRecord]) -> None:
        buckets = cut([record.nbytes for record in records], self._settings.bucket_bytes)
        largest = DIGEST_BYTES + max((bucket.nbytes for bucket in buckets), default=0)
        if not self._memory or self._memory[0].numel() < largest:
            self._memory = [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]
        until = time.monotonic() + self._client.left_s()
        sending = []
        content = filled(
            buckets,
            self._source,
            records,
            self._memory,
            version=self._client.version,
            checksum=self._settings.checksum,
        )
        for bucket in content:
            sending.append(self._group.send(bucket, until))
            if len(sending) > 1:
                sending.pop(0)()
        for wait in sending:
            wait()

    def shutdown(self) -> None:
        """Leaves the group, which ends it for the engines too."""
        self._group.leave()


def _with_names(error: GroupBroken, client: EngineClient, told: Future[Any]) -> Exception:
    """What the engines say of it, if they do so soon; else the engines that the group's error points to."""
    said = told.exception(timeout=ANSWER_S) if _ends(told) else None
    if isinstance(said, Exception):
        return said
    names = list(client.workers)
    at_fault = sorted({names[(rank - 1) // client.ranks_per_engine] for rank in error.ranks if rank})
    for name in at_fault:
        client.failures.setdefault(name, str(error))
    return GroupBroken(f"{', '.join(at_fault) or 'the group'}: {error}", error.ranks)


def _ends(told: Future[Any]) -> bool:
    try:
        told.exception(timeout=ANSWER_S)
    except TimeoutError:
        return False
    return True
