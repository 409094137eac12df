"""vLLM's side of the transport `gloo`: as shared memory, but `prepare` reads the tensors from a group with the learner.

Invariants:
- Forming the group and receiving run in the engine's thread for weights, while the model generates; on CPUs the tensors go into
  the twin as they come, elsewhere they wait in the host's memory for the pause.
- What fails before `apply` leaves the old weights, and ends this engine's membership, which the learner notices at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from actors.weights.buckets import cut, put_together, receiving
from actors.weights.gloo_group import GlooGroup
from actors.weights.publication import TensorRecord
from actors.weights.transfer_engine import SharedMemoryTransferEngine, SharedMemoryUpdateInfo
from actors.weights.verification import Refused


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the group meets, and this engine's place in it."""

    address: str
    port: int
    rank_offset: int
    size: int
    deadline_s: float


@dataclass
class GlooUpdateInfo(SharedMemoryUpdateInfo):
    """With `bucket_bytes` the tensors come over the group; without, from shared memory."""

    bucket_bytes: int = 0
    within_s: float = 0.0


class GlooTransferEngine(SharedMemoryTransferEngine):
    """Registered by `actors.weights.plugin`."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: Future[GlooGroup] | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Returns at once; what goes wrong is refused with the next update."""
        if self._group is not None and self._group.done() and self._group.exception() is None:
            self._group.result().leave()
        self._group = self._thread.submit(self._join, init_info)

    def _join(self, info: GlooInitInfo) -> GlooGroup:
        parallel = self.parallel_config
        rank = info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        return GlooGroup.join(info.address, info.port, rank=rank, size=info.size, deadline_s=info.deadline_s)

    def _prepare(self, info: SharedMemoryUpdateInfo) -> None:
        try:
            super()._prepare(info)
        except BaseException:
            self._leave()
            raise

    def _arriving(
        self, info: SharedMemoryUpdateInfo, records: list[TensorRecord]
    ) -> dict[str, torch.Tensor] | Iterator[tuple[str, torch.Tensor]]:
        if not isinstance(info, GlooUpdateInfo) or not info.bucket_bytes:
            return super()._arriving(info, records)
        if self._group is None:
            raise Refused("there is no group with the learner")
        group, until = self._group.result(), time.monotonic() + info.within_s
        buckets = cut([record.nbytes for record in records], info.bucket_bytes)
        arriving = receiving(buckets, lambda buffer: group.receive(buffer, until))
        return put_together(buckets, records, arriving, version=info.version)

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None and group.done() and group.exception() is None:
            group.result().leave()

    def shutdown(self) -> None:
        self._leave()
        super().shutdown()
