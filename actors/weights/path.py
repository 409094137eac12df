"""How a run's weights get from its learner to its engines: through memory, or over a group and through memory where that fails.

Invariants:
- A publication ends: the group's attempt after `weights.deadline_s`, and the memory's, which follows only where a group broke,
  after as long again.
- In the group are the engines that have the latest weights and have nothing else under way. Who joined, failed, or is behind
  gets the weights through memory first, and is in the group of the next publication.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from actors.weights.channel import Delivery, WeightChannel
from actors.weights.publication import Publication
from actors.weights.trainer_driven import Sent
from toolrl.weight_transport import Transport


class Learner(Protocol):
    """What is asked of `LearnerGroup`."""

    async def publish(self, version: int, *, checksum: bool = True) -> Publication: ...

    async def publish_again(self, *, checksum: bool = True) -> Publication: ...

    async def send(self, version: int, workers: Mapping[str, Any]) -> Sent: ...


class Workers(Protocol):
    """What is asked of `WorkerPool`."""

    channel: WeightChannel

    def handles(self) -> Mapping[str, Any]: ...


class WeightPath:
    """One a run, in the driver."""

    def __init__(self, learner: Learner, workers: Workers, transport: Transport, *, checksum: bool = True) -> None:
        self.learner, self.workers, self.transport = learner, workers, transport
        self.checksum = checksum
        self.channel = workers.channel
        self.channel.provide = lambda: learner.publish_again(checksum=checksum)

    async def publish(self, version: int) -> Delivery:
        """The learner's weights of now, as `version`, to every engine; the delivery names those that are behind."""
        started = time.monotonic()
        sent: Sent | None = None
        if self.transport != "shared_memory":
            up_to_date = set(self.channel.up_to_date())
            members = {name: actor for name, actor in self.workers.handles().items() if name in up_to_date}
            if members:
                sent = await self.learner.send(version, members)
        if sent is not None and sent.applied and not sent.broke:
            publication = Publication(version, (), nbytes_sent=sent.nbytes, in_memory=False)
            delivery = self.channel.sent(publication, sent.applied, sent.left_out)
        else:
            publication = await self.learner.publish(version, checksum=self.checksum)
            delivery = await self.channel.publish(publication)
            delivery.broke = "" if sent is None else sent.broke or "no engine of the group answered"
        self.channel.times = times(delivery, publication, sent, time.monotonic() - started)
        return delivery


def times(delivery: Delivery, publication: Publication, sent: Sent | None, update_s: float) -> dict[str, float]:
    """Metrics of one publication: the learner's parts, and the slowest engine's."""
    reports = list(delivery.applied.values())

    def slowest(part: str) -> float:
        return max((float(report.get(part, 0.0)) for report in reports), default=0.0)

    over_group = sent is not None and not delivery.broke
    return {
        "weights/update_s": update_s,
        "weights/connect_s": 0.0 if sent is None else sent.connect_s,
        "weights/gather_s": publication.gather_s if sent is None or not over_group else sent.gather_s,
        "weights/send_s": publication.write_s if sent is None or not over_group else sent.send_s,
        "weights/fetch_s": slowest("fetch_s"),
        "weights/prepare_s": slowest("prepare_s"),
        "weights/pause_s": slowest("paused_s"),
        "weights/apply_s": slowest("load_s"),
        "weights/over_group": float(len(reports)) if over_group else 0.0,
    }
