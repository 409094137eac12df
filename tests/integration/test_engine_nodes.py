"""An engine whose processes lie on two nodes of a Ray cluster: exact before and after weights that it is given in the middle of a
request, all or nothing, and ended when one of its nodes is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.requirements import need

need("ray", "vllm")

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError

from actors.engine import Engine
from actors.engine_errors import WeightsRefused
from actors.node_groups import PlacementGroup, packed, place, remove_placement_group
from actors.weights import Publication, WeightReceiver
from tests.integration import tiny_engines as tiny
from toolrl.config import EngineConfig

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = [(7 * k) % 250 + 2 for k in range(150)]
TEMPERATURE = 0.6
LONG = 350
TWO_NODES = EngineConfig(tensor_parallel=2, nodes=2, kv_cache_gib=0.1, max_concurrent_requests=16)


@ray.remote(num_cpus=1)
class Worker:
    """A rollout worker's engine and receiver."""

    async def start(self, model_dir: str, places: PlacementGroup) -> None:
        self.engine = await Engine.start(
            model_dir,
            TWO_NODES,
            dtype="float32",
            max_context_tokens=tiny.CONTEXT,
            seed=0,
            name="spread",
            device="cpu",
            places=places,
        )
        self.receiver = WeightReceiver(self.engine)

    async def sample(self, name: str, tokens: int) -> Any:
        return await self.engine.generate(
            PROMPT, max_tokens=tokens, temperature=TEMPERATURE, stop_token_ids=[], seed=5, request_id=name
        )

    async def update(self, publication: Publication) -> dict[str, Any]:
        return await self.receiver.apply(publication)

    async def watch(self) -> None:
        assert self.engine.nodes is not None
        await self.engine.nodes.watch()

    async def lose_the_other_node(self) -> None:
        assert self.engine.nodes is not None
        self.engine.nodes.stop()


@pytest.fixture
def cluster() -> Iterator[None]:
    """Two nodes with room for one process each; the driver, which publishes, is on the first."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100_000_000})
    try:
        made.add_node(num_cpus=1, object_store_memory=100_000_000)
        ray.init(address=made.address, namespace="toolrl", log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        made.shutdown()


def test_an_engine_over_two_nodes_is_exact_and_takes_weights_whole(cluster: None, tmp_path: Path) -> None:
    policies = [tiny.model(seed) for seed in range(3)]
    model_dir = str(tiny.folder(tmp_path, 0))
    asyncio.run(_lives(policies, model_dir))


async def _lives(policies: list[Any], model_dir: str) -> None:
    places = await packed("engine node", 2, {"CPU": 1.0})
    worker = Worker.options(scheduling_strategy=place(places, 0)).remote()
    await worker.start.remote(model_dir, places)
    assert len(set(ray.util.placement_group_table(places)["bundles_to_node_id"].values())) == 2

    def gap(one: Any, version: int) -> float:
        return tiny.gap(one.logprobs, tiny.logprobs(policies[version], PROMPT, one.token_ids, TEMPERATURE))

    assert gap(await worker.sample.remote("before", 40), 0) < tiny.TOLERANCE
    running = []
    for k in range(8):  # some are under way, however fast the machine
        running.append(asyncio.ensure_future(worker.sample.remote(f"during-{k}", LONG)))
        await asyncio.sleep(0.05)
    report = await worker.update.remote(tiny.publication(policies[1], 1))
    assert (report["version"], report["load_s"] > 0) == (1, True)
    mixed_ones = [each for each in await asyncio.gather(*running) if {0, 1} == set(each.weight_versions)]
    assert mixed_ones, "the update did not fall into a request: the test shows nothing"
    one = mixed_ones[0]
    n = one.weight_versions.count(0)
    mixed = tiny.logprobs(policies[1], PROMPT, one.token_ids, TEMPERATURE, before=(policies[0], n))
    assert tiny.gap(one.logprobs, mixed) < tiny.TOLERANCE

    sound = tiny.publication(policies[2], 2)
    spoilt = replace(sound, tensors=(replace(sound.tensors[0], checksum="0" * 32), *sound.tensors[1:]))
    with pytest.raises(WeightsRefused, match="checksum of"):
        await worker.update.remote(spoilt)
    assert gap(await worker.sample.remote("refused", 40), 1) < tiny.TOLERANCE
    await worker.update.remote(sound)
    assert gap(await worker.sample.remote("after", 40), 2) < tiny.TOLERANCE

    watching = asyncio.ensure_future(worker.watch.remote())
    await worker.lose_the_other_node.remote()
    with pytest.raises(RayActorError):
        await asyncio.wait_for(watching, 20)
    ray.kill(worker)
    remove_placement_group(places)
