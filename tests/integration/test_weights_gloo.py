"""Weights over a group of the learner and two engines, each in a process of its own; members leave, come, hang, die."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from tests.requirements import need

need("vllm", "ray")

import ray

from actors.engine import Generated
from actors.weights import Publication, Publisher, WeightChannel, WeightReceiver
from actors.weights.driven_update import DrivenUpdate
from actors.weights.path import WeightPath
from actors.weights.publication import this_host
from actors.weights.trainer_driven import Sent, TrainerDrivenWeights
from learner.weight_source import ParameterMeta, WeightSource
from tests.integration import tiny_engines as tiny

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

POLICIES = [tiny.model(0), tiny.model(1)]  # version v has the weights of POLICIES[v % 2]
PROMPT = [(7 * k) % 250 + 2 for k in range(80)]
DEADLINE_S = 6.0
BUCKET_BYTES = 1 << 14  # some tensors are larger


class Worker:
    """As much of a rollout worker as weights need."""

    async def start(self, model_dir: Path, name: str) -> None:
        self.engine = await tiny.engine(model_dir, name, transport="gloo")
        self.receiver = WeightReceiver(self.engine)
        self.driven = DrivenUpdate(self.receiver, prepares=True, deadline_s=2.0)

    async def update_weights(self, publication: Publication) -> dict[str, Any]:
        return await self.receiver.apply(publication)

    async def weight_step(self, name: str, argument: Any = None) -> dict[str, float] | None:
        return await self.driven.step(name, argument)

    async def sample(self, max_tokens: int = 20) -> Generated:
        return await self.engine.generate(
            PROMPT, max_tokens=max_tokens, temperature=0.6, stop_token_ids=[], seed=1, request_id=os.urandom(4).hex()
        )

    async def engine_process(self) -> int:
        import multiprocessing

        (process,) = multiprocessing.active_children()
        assert process.pid is not None
        return process.pid

    async def stop(self) -> None:
        await self.engine.stop()


class Trap(WeightSource):
    """A source that does something to a process when it is half through."""

    process: tuple[int, int] | None = None  # its id, and the signal

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        metadata: list[ParameterMeta] = self.metadata()
        for number, item in enumerate(super().__iter__()):
            if number == len(metadata) // 2 and self.process is not None:
                os.kill(*self.process)
                self.process = None
            yield item


class Learner:
    """One rank."""

    def __init__(self) -> None:
        self.model = tiny.model(0)
        self.publisher = Publisher()
        self.source = Trap(self.model)
        self.driven = TrainerDrivenWeights(
            "gloo", self.source, rank=0, address=this_host(), bucket_bytes=BUCKET_BYTES, deadline_s=DEADLINE_S
        )

    def train(self, version: int) -> None:
        self.model.load_state_dict(tiny.model(version % 2).state_dict())

    def set_trap(self, process: int, number: int) -> None:
        self.source.process = (process, number)

    def send(self, version: int, workers: Mapping[str, Any]) -> Sent:
        return self.driven.publish(version, workers, ranks_per_engine=1)

    def publish(self, version: int) -> Publication:
        return self.publisher.publish(self.source, version)


@dataclass
class Cluster:
    """What the driver has; the learner of a `WeightPath`, and its workers."""

    actor: Any
    everybody: dict[str, Any]
    channel: WeightChannel = field(default_factory=lambda: WeightChannel(DEADLINE_S))
    members: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    sent: list[Sent] = field(default_factory=list)
    in_memory: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path = WeightPath(self, self, "gloo")

    def handles(self) -> Mapping[str, Any]:
        return self.members

    async def join(self, name: str) -> None:
        worker = self.everybody[name]
        await self.channel.join(name, worker.update_weights.remote)
        self.members[name] = worker

    def leave(self, name: str) -> None:
        self.channel.leave(name)
        del self.members[name]

    async def publish(self, version: int, *, checksum: bool = True) -> Publication:
        self.in_memory.append(version)
        publication: Publication = await self.actor.publish.remote(version)
        return publication

    async def publish_again(self, *, checksum: bool = True) -> Publication:
        return await self.publish(self.version)

    async def send(self, version: int, workers: Mapping[str, Any]) -> Sent:
        self.sent.append(await self.actor.send.remote(version, dict(workers)))
        return self.sent[-1]

    async def step(self) -> Any:
        """The next version is trained and published."""
        self.version += 1
        await self.actor.train.remote(self.version)
        return await self.path.publish(self.version)

    async def serves(self, name: str, version: int) -> None:
        one = await self.everybody[name].sample.remote()
        assert one.weight_versions == [version] * 20
        trainer = tiny.logprobs(POLICIES[version % 2], PROMPT, one.token_ids, 0.6)
        assert tiny.gap(one.logprobs, trainer) < tiny.TOLERANCE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    folder = tiny.folder(tmp_path_factory.mktemp("gloo"), 0)
    workers = {name: ray.remote(Worker).options(num_cpus=0).remote() for name in ("a", "b")}
    learner = ray.remote(Learner).options(num_cpus=0).remote()
    await asyncio.gather(*(worker.start.remote(folder, name) for name, worker in workers.items()))
    found = Cluster(learner, workers)
    for name in workers:
        await found.join(name)
    yield found
    found.channel.close()
    for worker in workers.values():
        with_grace = asyncio.wait_for(worker.stop.remote(), 10)
        await asyncio.gather(with_grace, return_exceptions=True)
    ray.shutdown()


async def test_both_engines_serve_what_the_learner_sent(cluster: Cluster) -> None:
    for version in (1, 2, 3):
        delivery = (await cluster.step()).require_all()
        assert (delivery.version, delivery.broke, set(delivery.applied)) == (version, "", {"a", "b"})
        for name in ("a", "b"):
            await cluster.serves(name, version)
    assert cluster.in_memory == []
    assert [sent.connect_s > 0 for sent in cluster.sent] == [True, False, False]
    gauges = cluster.channel.gauges()
    assert (gauges["weights/over_group"], gauges["weights/bytes"]) == (
        2,
        sum(p.nbytes for p in POLICIES[0].parameters()),
    )
    assert (
        gauges["weights/update_s"]
        > gauges["weights/prepare_s"]
        > gauges["weights/pause_s"]
        > gauges["weights/apply_s"]
        > 0
    )


async def test_weights_that_come_in_mid_generation_keep_requests_and_label_every_token(cluster: Cluster) -> None:
    running = [asyncio.ensure_future(cluster.everybody["a"].sample.remote(400)) for _ in range(4)]
    await asyncio.sleep(0.3)
    before = cluster.version
    (await cluster.step()).require_all()
    made = await running[0]
    await asyncio.gather(*running[1:])
    assert set(made.weight_versions) == {before, before + 1}
    n = made.weight_versions.count(before)
    old, new = POLICIES[before % 2], POLICIES[(before + 1) % 2]
    expected = tiny.logprobs(new, PROMPT, made.token_ids, 0.6, before=(old, n))
    assert tiny.gap(made.logprobs, expected) < 2 * tiny.TOLERANCE


async def test_who_joins_gets_the_latest_through_memory_and_is_in_the_next_group(cluster: Cluster) -> None:
    cluster.leave("b")
    (await cluster.step()).require_all()
    assert list(cluster.sent[-1].applied) == ["a"] and cluster.sent[-1].connect_s > 0
    await cluster.serves("a", cluster.version)
    await cluster.serves("b", cluster.version - 1)
    await cluster.join("b")
    assert cluster.in_memory == [cluster.version]
    await cluster.serves("b", cluster.version)
    delivery = (await cluster.step()).require_all()
    assert set(delivery.applied) == {"a", "b"} and cluster.sent[-1].connect_s > 0
    assert len(cluster.in_memory) == 1
    await cluster.serves("b", cluster.version)


async def test_a_silent_engine_is_left_out_and_catches_up(cluster: Cluster) -> None:
    process = await cluster.everybody["b"].engine_process.remote()
    os.kill(process, signal.SIGSTOP)
    try:
        started = time.monotonic()
        delivery = await cluster.step()
        assert time.monotonic() - started < DEADLINE_S
        assert list(delivery.applied) == ["a"] and "no answer" in delivery.behind["b"]
        await cluster.serves("a", cluster.version)
    finally:
        os.kill(process, signal.SIGCONT)
    await caught_up(cluster)
    await cluster.serves("b", cluster.version)
    assert set((await cluster.step()).applied) == {"a", "b"}


async def test_an_engine_that_hangs_in_the_middle_is_named_by_the_deadline(cluster: Cluster) -> None:
    process = await cluster.everybody["b"].engine_process.remote()
    await cluster.actor.set_trap.remote(process, signal.SIGSTOP)
    try:
        started = time.monotonic()
        delivery = await cluster.step()
        assert time.monotonic() - started < 2 * DEADLINE_S + 3
        assert "b" in delivery.broke and list(delivery.applied) == ["a"] and "no answer" in delivery.behind["b"]
        await cluster.serves("a", cluster.version)
    finally:
        os.kill(process, signal.SIGCONT)
    await caught_up(cluster)
    await cluster.serves("b", cluster.version)
    assert set((await cluster.step()).require_all().applied) == {"a", "b"}


async def test_an_engine_killed_in_the_middle_ends_nothing_but_itself(cluster: Cluster) -> None:
    process = await cluster.everybody["b"].engine_process.remote()
    await cluster.actor.set_trap.remote(process, signal.SIGKILL)
    started = time.monotonic()
    delivery = await cluster.step()
    assert time.monotonic() - started < DEADLINE_S
    assert "b" in delivery.broke and list(delivery.applied) == ["a"] and "engine b died" in delivery.behind["b"]
    await cluster.serves("a", cluster.version)
    cluster.leave("b")
    (await cluster.step()).require_all()
    assert list(cluster.sent[-1].applied) == ["a"]
    await cluster.serves("a", cluster.version)


async def test_a_learner_that_dies_leaves_engines_that_serve_what_they_had(cluster: Cluster) -> None:
    await cluster.everybody["a"].weight_step.remote("start", DEADLINE_S)
    ray.kill(cluster.actor)
    await cluster.serves("a", cluster.version)
    await asyncio.sleep(2.5)  # the update is given up
    await cluster.everybody["a"].update_weights.remote(tiny.publication(POLICIES[1], 101))
    await cluster.serves("a", 101)


async def caught_up(cluster: Cluster) -> None:
    for _ in range(200):
        if not cluster.channel.behind:
            return
        cluster.channel.retry()
        await asyncio.sleep(0.1)
    raise AssertionError(f"still behind: {cluster.channel.behind}")
