"""The learner's end of `nccl`, `ipc` and `gloo`: every rank gathers, rank 0 sends and drives the workers.

Invariants:
- All ranks come to the end of the source together, whatever fails: a rank that stopped in the middle would leave the others in
  a collective for ever.
- A group holds the engines that it was formed with. Before a publication to others it is formed anew; after a failure too.
- A publication ends by its deadline with a report; that engines failed is no error of the learner.

vLLM's engines do the transfer of `nccl` and `ipc` as they are.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from actors.weights.engine_client import EngineClient

log = logging.getLogger(__name__)

Driven = Literal["nccl", "ipc", "gloo"]


@dataclass
class Sent:
    """What became of one publication through a group."""

    version: int
    nbytes: int = 0
    applied: dict[str, dict[str, float]] = field(default_factory=dict)  # engine -> what its update took
    left_out: dict[str, str] = field(default_factory=dict)  # engine -> why it was not waited for
    failed: dict[str, str] = field(default_factory=dict)  # engine -> why
    broke: str = ""  # why the group did not bring it to all of its engines
    connect_s: float = 0.0
    gather_s: float = 0.0
    send_s: float = 0.0  # from the first step to the last, without `gather_s`


class Gathering:
    """A weight source that knows how long its tensors took to gather, and whether it was run through."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._under_way: Iterator[tuple[str, torch.Tensor]] | None = None
        self._done = False
        self.gather_s = 0.0

    def begin(self) -> None:
        """A publication begins: the source is to be run through once."""
        self._under_way, self._done, self.gather_s = None, False, 0.0

    def metadata(self) -> list[Any]:
        found: list[Any] = self._source.metadata()
        return found

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._under_way = iter(self._source)
        while True:
            started = time.monotonic()
            item = next(self._under_way, None)
            self.gather_s += time.monotonic() - started
            if item is None:
                break
            yield item
        self._done = True

    def run_through(self) -> None:
        """To the end, from where it stands; from the start if nobody began."""
        if not self._done:
            for _ in self._under_way if self._under_way is not None else iter(self._source):
                pass
            self._done = True


class TrainerDrivenWeights:
    """One on every rank. `publish` is collective."""

    def __init__(
        self,
        transport: Driven,
        source: Any,
        *,
        rank: int,
        address: str,
        bucket_bytes: int,
        checksum: bool = True,
        deadline_s: float = 120.0,
    ) -> None:
        """`source`: the ranks' weights, `learner.weight_source.WeightSource`; `address`: of this host, where a group meets."""
        self.transport, self.rank, self.address = transport, rank, address
        self.bucket_bytes, self.checksum, self.deadline_s = bucket_bytes, checksum, deadline_s
        self._source = Gathering(source)
        self._client = EngineClient({}, ranks_per_engine=1, tolerant=transport == "ipc")
        self._trainer: Any = None
        self._members: list[str] = []

    def publish(self, version: int, workers: Mapping[str, Any], *, ranks_per_engine: int) -> Sent:
        """Sends the source's weights to the workers' engines.

        Args:
            workers: on rank 0, handles whose `weight_step` is `DrivenUpdate.step`, by name; elsewhere nothing.
        """
        sent, client = Sent(version), self._client
        self._source.begin()
        client.workers, client.ranks_per_engine = dict(workers), ranks_per_engine
        client.begin(version, self.deadline_s)
        watch = threading.Timer(self.deadline_s, self._abort)
        watch.daemon = True
        started = time.monotonic()
        try:
            if self.rank == 0:
                sent.left_out = client.leave_out_the_silent()
                watch.start()
            self._connect(sent)
            started = time.monotonic()
            if self._trainer is not None:
                self._trainer.send_weights()
            if client.failures:
                raise RuntimeError("; ".join(f"{name}: {why}" for name, why in sorted(client.failures.items())))
            sent.applied = {name: client.reports[name] for name in client.workers} if self._trainer is not None else {}
        except Exception as error:
            sent.broke, sent.failed = f"{type(error).__name__}: {error}", dict(client.failures)
            log.warning("weights %d did not reach all engines over %s: %s", version, self.transport, sent.broke)
            client.cancel(f"weights {version} were not sent whole: {error}")
            self._disconnect()
        finally:
            watch.cancel()
            self._source.run_through()
        sent.gather_s = self._source.gather_s
        sent.send_s = max(0.0, time.monotonic() - started - sent.gather_s)
        sent.nbytes = sum(meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in self._source.metadata())
        return sent

    def _connect(self, sent: Sent) -> None:
        """A group of the client's workers, if this one is not it; none without workers, but for `ipc`, all of whose ranks
        take part in every update."""
        members = list(self._client.workers)
        if self._trainer is not None and members == self._members:
            return
        self._disconnect()
        if self.transport != "ipc" and (self.rank or not members):
            return
        started = time.monotonic()
        self._trainer, self._members = self._formed(), members
        sent.connect_s = time.monotonic() - started
        self._client.on_failure = self._abort

    def _formed(self) -> Any:
        if self.transport == "gloo":
            from actors.weights.gloo_sender import GlooSender, GlooSettings

            return GlooSender.form(
                self._client, self._source, GlooSettings(self.address, self.bucket_bytes, self.checksum)
            )
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        return WeightTransferTrainerFactory.trainer_init(self._init_info(), client=self._client, source=self._source)

    def _init_info(self) -> Any:
        if self.transport == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            size = 1 + len(self._client.workers) * self._client.ranks_per_engine
            port = free_port(self.address)
            return NCCLTrainerInitInfo(
                self.address, port, size, rank=self.rank, packed_buffer_size_bytes=self.bucket_bytes
            )
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        largest = max(meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in self._source.metadata())
        return IPCTrainerInitInfo(packed=True, rank=self.rank, packed_buffer_size_bytes=max(self.bucket_bytes, largest))

    def _abort(self) -> None:
        """From another thread, when an engine failed or the time is over: what waits for the group fails."""
        trainer = self._trainer
        if trainer is not None and self.transport == "nccl":
            trainer.shutdown()

    def _disconnect(self) -> None:
        trainer, self._trainer = self._trainer, None
        self._members = []
        self._client.on_failure = None
        if trainer is not None:
            trainer.shutdown()


def free_port(address: str) -> int:
    """Of this host, at this address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
