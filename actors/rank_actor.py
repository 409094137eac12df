"""The process of one learner rank, as Ray runs it."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from typing import Any, cast

import ray

from actors.weights import Publication, Publisher
from actors.weights.publication import this_host
from actors.weights.trainer_driven import Driven, Gathering, Sent, TrainerDrivenWeights
from learner.settings import RankSettings
from toolrl.config import WeightsConfig
from toolrl.weight_transport import Transport


class RankActor:
    """The process of one rank. `progress` answers from a thread of its own while a batch runs."""

    def __init__(self, transport: Transport, weights: WeightsConfig) -> None:
        self.rank: Any = None
        self.transport, self.weights = transport, weights
        self.publisher = Publisher(bucket_bytes=weights.bucket_mib << 20)
        self.driven: TrainerDrivenWeights | None = None

    def rendezvous(self) -> tuple[str, int]:
        """An address and a free port of this node, where the ranks meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return str(ray.util.get_node_ip_address()), int(probe.getsockname()[1])

    def start(self, settings: RankSettings, rank: int, world: int, address: str, port: int) -> None:
        """Imports DeepSpeed and loads the model; collective."""
        from learner.rank import LearnerRank

        self.rank = LearnerRank(settings, rank=rank, world=world, address=address, port=port)

    def call(self, method: str, *arguments: Any) -> Any:
        """`LearnerRank.method(*arguments)`."""
        return getattr(self.rank, method)(*arguments)

    def publish(self, version: int, checksum: bool) -> Publication | None:
        """Rank 0 writes the weights, or the adapter, into shared memory; the others take part in gathering them."""
        weights, adapter = self.rank.published()
        source, started = Gathering(weights), time.monotonic()
        if self.rank.rank == 0:
            publication = self.publisher.publish(source, version, checksum=checksum)
            return replace(
                publication,
                adapter=adapter,
                merged_nbytes=self.rank.weight_source().nbytes(),
                gather_s=source.gather_s,
                write_s=time.monotonic() - started - source.gather_s,
            )
        source.run_through()
        return None

    def send(self, version: int, workers: dict[str, Any], ranks_per_engine: int) -> Sent | None:
        """As `publish`, over a group with the engines of these workers, of which only rank 0 is told."""
        if self.driven is None:
            self.driven = TrainerDrivenWeights(
                cast(Driven, self.transport),
                self.rank.weight_source(),
                rank=self.rank.rank,
                address=this_host(),
                bucket_bytes=self.weights.bucket_mib << 20,
                checksum=self.weights.checksum,
                deadline_s=self.weights.deadline_s,
            )
        self.publisher.forget()  # what lies in memory for those who were not in the group before
        sent = self.driven.publish(version, workers, ranks_per_engine=ranks_per_engine)
        return sent if self.rank.rank == 0 else None

    def progress(self) -> dict[str, Any]:
        return self.rank.progress() if self.rank is not None else {"phase": "start", "finished": 0}
