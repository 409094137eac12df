"""The weight channel over real processes: a learner's actor publishes into Ray's object store, a worker's actor applies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.requirements import need

need("vllm", "ray")

import ray
from ray.cluster_utils import Cluster as Hosts

from actors.engine import Generated
from actors.weights import Publication, Publisher, WeightChannel, WeightReceiver, WeightsBehind
from actors.weights.driven_update import DrivenUpdate
from actors.weights.engine_client import EngineClient, places_in_group
from actors.weights.shared_memory import SlotGone, identity
from tests.integration import tiny_engines as tiny

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

POLICIES = [tiny.model(0), tiny.model(1)]  # version v has the weights of POLICIES[v % 2]
PROMPT = [(7 * k) % 250 + 2 for k in range(80)]


class Worker:
    """As much of a rollout worker as weights need. Its engine is one for `nccl`, which takes what comes through memory too."""

    async def start(self, model_dir: Path) -> None:
        self.engine = await tiny.engine(model_dir, "engine-a", transport="nccl")
        self.receiver = WeightReceiver(self.engine, fetch_deadline_s=40.0)
        self.driven = DrivenUpdate(self.receiver, prepares=False, deadline_s=2.0)

    async def update_weights(self, publication: Publication) -> dict[str, Any]:
        return await self.receiver.apply(publication)

    async def weight_step(self, name: str, argument: Any = None) -> dict[str, float] | None:
        return await self.driven.step(name, argument)

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
    def __init__(self) -> None:
        self.publisher = Publisher(bucket_bytes=1 << 16)

    def publish(self, version: int) -> Publication:
        return self.publisher.publish(tiny.model(version % 2).named_parameters(), version)


@dataclass
class Cluster:
    worker: Any
    learner: Any
    distant: Any  # a learner on another of Ray's hosts

    def take(self, publication: Publication) -> Awaitable[Mapping[str, Any]]:
        return self.worker.update_weights.remote(publication)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two of Ray's hosts on this machine, with a place for a learner each."""
    memory = {"object_store_memory": 1 << 27}
    hosts = Hosts(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"here": 3}, **memory})
    hosts.add_node(num_cpus=1, resources={"elsewhere": 1}, **memory)
    ray.init(address=hosts.address, log_to_driver=False)
    yield hosts
    ray.shutdown()
    hosts.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    here, elsewhere = {"num_cpus": 0, "resources": {"here": 1}}, {"num_cpus": 0, "resources": {"elsewhere": 1}}
    worker, learner = ray.remote(Worker).options(**here).remote(), ray.remote(Learner).options(**here).remote()
    await worker.start.remote(tiny.folder(tmp_path_factory.mktemp("ray"), 0))
    yield Cluster(worker, learner, ray.remote(Learner).options(**elsewhere).remote())
    await worker.stop.remote()


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
        assert len(publication.paths) > 1
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


async def test_an_update_that_breaks_off_leaves_nothing_in_the_engine(cluster: Cluster) -> None:
    client = EngineClient({"rollout-0": cluster.worker}, ranks_per_engine=1, tolerant=False)
    client.begin(7, 30)
    assert await asyncio.to_thread(client.leave_out_the_silent) == {}
    await asyncio.to_thread(client.start_weight_update)
    waiting = asyncio.ensure_future(cluster.worker.sample.remote())
    names = [name for name, _ in POLICIES[1].named_parameters()]
    payload = {
        "names": names,
        "dtype_names": ["float32"] * len(names),
        "shapes": [list(each.shape) for each in POLICIES[1].parameters()],
    }
    with pytest.raises(WeightsBehind, match=r"'update' failed on rollout-0.*engine-a.*not initialized"):
        await asyncio.to_thread(client.update_weights, payload)  # vLLM's engine has begun, and has no group
    assert list(client.failures) == ["rollout-0"]
    with pytest.raises(ray.exceptions.RayTaskError, match="engine-a is without valid weights"):
        await waiting
    for version in (8, 9):
        await cluster.worker.update_weights.remote(tiny.publication(POLICIES[version % 2], version))
        await assert_serves(cluster, version)


async def test_a_trainer_that_falls_silent_does_not_hold_the_engine(cluster: Cluster) -> None:
    await cluster.worker.weight_step.remote("start", 30)
    latest = asyncio.ensure_future(cluster.worker.update_weights.remote(tiny.publication(POLICIES[1], 9)))
    waiting = asyncio.ensure_future(cluster.worker.sample.remote())
    await asyncio.sleep(1)
    assert not waiting.done() and not latest.done()  # paused; nothing else updates the engine
    await asyncio.wait_for(asyncio.gather(waiting, latest), 40)
    assert set(waiting.result().weight_versions) == {9}
    await assert_serves(cluster, 9)


async def test_a_tolerant_trainer_hears_of_a_failure_at_the_end(cluster: Cluster) -> None:
    client = EngineClient({"rollout-0": cluster.worker}, ranks_per_engine=1, tolerant=True)
    client.begin(10, 30)
    heard: list[str] = []
    client.on_failure = lambda: heard.extend(client.failures)
    await asyncio.to_thread(client.update_weights, {"names": []})  # nobody began
    await asyncio.to_thread(client.finish_weight_update)  # not said any more
    assert heard == ["rollout-0"] == list(client.failures)
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


async def test_bytes_come_from_a_learner_on_another_host(cluster: Cluster) -> None:
    near = await cluster.learner.publish.remote(10)
    far = await cluster.distant.publish.remote(10)
    assert (far.node != near.node, far.checksum) == (True, near.checksum)
    report = await cluster.take(far)
    assert (report["version"], report["checksum"]) == (10, far.checksum)
    await assert_serves(cluster, 10)
    for version in (11, 12):
        await cluster.distant.publish.remote(version)  # the second into the memory of version 10
    with pytest.raises(ray.exceptions.RayTaskError, match=r"engine-a: the bytes of version 13 are lost .*overwritten"):
        await cluster.take(replace(far, version=13))
    await assert_serves(cluster, 10)


async def test_bytes_lost_with_their_learner_are_an_error_and_the_engine_goes_on(cluster: Cluster) -> None:
    publication = await cluster.learner.publish.remote(14)
    ray.kill(cluster.learner)
    with pytest.raises(SlotGone):
        for _ in range(100):
            identity(publication.head)
            await asyncio.sleep(0.1)
    with pytest.raises(ray.exceptions.RayTaskError, match="engine-a: the bytes of version 14 are lost"):
        await asyncio.wait_for(cluster.take(publication), 60)
    await assert_serves(cluster, 10)
