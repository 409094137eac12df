"""The weight channel over real processes: a learner's actor publishes into Ray's object store, a worker's actor applies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.requirements import need

need("vllm", "ray")

import ray

from actors.engine import Generated
from actors.weights import Publication, WeightChannel, WeightReceiver, WeightsBehind, publish
from actors.weights.shared_memory import staged
from actors.weights.trainer_driven import DrivenUpdate, EngineClient, places_in_group
from tests.integration import tiny_engines as tiny

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

POLICIES = [tiny.model(0), tiny.model(1)]  # version v has the weights of POLICIES[v % 2]
PROMPT = [(7 * k) % 250 + 2 for k in range(80)]


class Worker:
    """As much of a rollout worker as weights need."""

    async def start(self, model_dir: Path) -> None:
        self.engine = await tiny.engine(model_dir, "engine-a")
        self.receiver = WeightReceiver(self.engine, fetch_deadline_s=5.0)
        self.driven = DrivenUpdate(self.engine, deadline_s=2.0)

    async def update_weights(self, publication: Publication) -> dict[str, Any]:
        return await self.receiver.apply(publication)

    async def weight_step(self, name: str, argument: Any = None) -> None:
        await self.driven.step(name, argument)

    async def sample(self) -> Generated:
        return await self.engine.generate(
            PROMPT, max_tokens=20, temperature=0.6, stop_token_ids=[], seed=1, request_id=os.urandom(4).hex()
        )

    async def engine_process(self) -> int:
        import multiprocessing

        (process,) = multiprocessing.active_children()
        assert process.pid is not None
        return process.pid

    async def stop(self) -> None:
        await self.engine.stop()


class Learner:
    def publish(self, version: int) -> Publication:
        return publish(tiny.model(version % 2).named_parameters(), version, bucket_bytes=1 << 16)


@dataclass
class Cluster:
    worker: Any
    learner: Any

    def take(self, publication: Publication) -> Awaitable[Mapping[str, Any]]:
        return self.worker.update_weights.remote(publication)  # type: ignore[no-any-return]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    ray.init(address="local", include_dashboard=False, num_cpus=2, object_store_memory=1 << 27, log_to_driver=False)
    worker, learner = ray.remote(Worker).options(num_cpus=1).remote(), ray.remote(Learner).options(num_cpus=0).remote()
    await worker.start.remote(tiny.folder(tmp_path_factory.mktemp("ray"), 0))
    yield Cluster(worker, learner)
    await worker.stop.remote()
    ray.shutdown()


async def assert_serves(cluster: Cluster, version: int) -> None:
    one = await cluster.worker.sample.remote()
    assert one.weight_versions == [version] * 20
    trainer = tiny.logprobs(POLICIES[version % 2], PROMPT, one.token_ids, 0.6)
    assert tiny.gap(one.logprobs, trainer) < tiny.TOLERANCE


async def test_an_engine_serves_what_the_learner_published(cluster: Cluster) -> None:
    await assert_serves(cluster, 0)
    channel = WeightChannel(deadline_s=60)
    await channel.join("rollout-0", cluster.take)
    for version in (1, 2, 3):
        publication = await cluster.learner.publish.remote(version)
        assert len(publication.buckets) > 1
        delivery = (await channel.publish(publication)).require_all()
        report = delivery.applied["rollout-0"]
        assert (report["engine"], report["version"]) == ("engine-a", version)
        assert report["checksum"] == publication.checksum == tiny.publication(POLICIES[version % 2], version).checksum
        await assert_serves(cluster, version)


async def test_an_engine_that_hangs_is_named_by_the_deadline_and_catches_up(cluster: Cluster) -> None:
    channel = WeightChannel(deadline_s=1.0)
    await channel.join("rollout-0", cluster.take)
    process = await cluster.worker.engine_process.remote()
    os.kill(process, signal.SIGSTOP)
    try:
        for version in (4, 5, 6):
            delivery = await asyncio.wait_for(
                channel.publish(await cluster.learner.publish.remote(version)), channel.deadline_s + 5
            )
            with pytest.raises(WeightsBehind, match=rf"weights {version} .* rollout-0: no answer in 1 s"):
                delivery.require_all()
    finally:
        os.kill(process, signal.SIGCONT)
    for _ in range(200):
        if not channel.behind:
            break
        await asyncio.sleep(0.1)
    assert channel.behind == {}
    await assert_serves(cluster, 6)


async def test_steps_driven_by_a_trainer_and_one_that_breaks_off(cluster: Cluster) -> None:
    client = EngineClient({"rollout-0": cluster.worker}, ranks_per_engine=1, deadline_s=30)
    publication = tiny.publication(POLICIES[1], 7)
    with staged(publication.buckets) as paths:
        payload = {"version": 7, "paths": paths, "tensors": [record.fields() for record in publication.tensors]}
        client.version = 7
        await asyncio.to_thread(client.start_weight_update)
        waiting = asyncio.ensure_future(cluster.worker.sample.remote())
        await asyncio.to_thread(client.update_weights, payload)
        assert not waiting.done()
        await asyncio.to_thread(client.finish_weight_update)
    assert (await waiting).weight_versions == [7] * 20
    await assert_serves(cluster, 7)

    await asyncio.to_thread(client.start_weight_update)
    with pytest.raises(WeightsBehind, match=r"rollout-0.*engine-a"):
        await asyncio.to_thread(client.update_weights, payload)  # its files are gone
    client.cancel("the test broke it off")
    with pytest.raises(ray.exceptions.RayTaskError, match="engine-a is without valid weights"):
        await cluster.worker.sample.remote()
    await cluster.worker.update_weights.remote(tiny.publication(POLICIES[0], 8))
    await assert_serves(cluster, 8)


async def test_a_trainer_that_falls_silent_does_not_hold_the_engine(cluster: Cluster) -> None:
    await cluster.worker.weight_step.remote("start")
    with pytest.raises(ray.exceptions.RayTaskError, match=r"engine-a .* silent for 2 s"):
        await asyncio.wait_for(cluster.worker.sample.remote(), 20)
    await cluster.worker.update_weights.remote(tiny.publication(POLICIES[1], 9))
    await assert_serves(cluster, 9)


async def test_vllms_gpu_transports_take_what_we_give_them() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    assert {
        "nccl",
        "ipc",
    } <= WeightTransferEngineFactory._registry.keys() & WeightTransferTrainerFactory._registry.keys()
    assert NCCLTrainerInitInfo("10.0.0.1", 29500, 5, rank=0).is_sender
    assert IPCTrainerInitInfo(packed=True, rank=1).backend == "ipc"
    info = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 5}
    places = places_in_group(info, ["a", "b"], ranks_per_engine=2)
    assert [NCCLWeightTransferInitInfo(**places[name]).rank_offset for name in ("a", "b")] == [1, 3]


async def test_bytes_lost_with_their_learner_are_an_error_and_the_engine_goes_on(cluster: Cluster) -> None:
    publication = await cluster.learner.publish.remote(10)
    ray.kill(cluster.learner)
    with pytest.raises(ray.exceptions.OwnerDiedError):  # its death is known when its objects are gone for others too
        for _ in range(100):
            await asyncio.to_thread(ray.get, publication.buckets[0], timeout=10)
            await asyncio.sleep(0.1)
    with pytest.raises(ray.exceptions.RayTaskError, match="engine-a: the bytes of version 10 are lost"):
        await asyncio.wait_for(cluster.take(publication), 60)
    await assert_serves(cluster, 9)
