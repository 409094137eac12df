"""Parts on the nodes of their group, learner ranks packed, engines beside ranks or over several nodes, and an error within
seconds where there is no room."""

from __future__ import annotations

import asyncio
import time

import pytest
import ray
from ray.cluster_utils import Cluster

from actors.engine_places import EnginePlaces
from actors.node_groups import PLACED_WITHIN_S, fits, group_resources, packed, place, remove_placement_group
from tests.requirements import need
from toolrl import presets
from toolrl.placement import Part, Placement, PlacementError, needed

pytestmark = pytest.mark.ray


@ray.remote
class Where:
    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def gpu(self) -> tuple[str, list[int]]:
        return self.node(), ray.get_gpu_ids()


def test_parts_go_where_they_belong_or_say_what_is_missing() -> None:
    need("ray")
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=4, resources={"group-head": 1})
        cluster.add_node(num_cpus=2, resources={"group-learner": 1})
        cluster.add_node(num_cpus=4, num_gpus=2, resources={"group-learner": 1})
        ray.init(address=cluster.address, log_to_driver=False)
        groups = {n["NodeID"]: next(k for k in n["Resources"] if k.startswith("group-")) for n in ray.nodes()}
        assert group_resources("rollout") == {}
        assert group_resources("learner") == {"group-learner": 0.001}
        asyncio.run(_placed(groups))
        asyncio.run(_beside_ranks())
        asyncio.run(_over_nodes())
    finally:
        ray.shutdown()
        cluster.shutdown()


async def _placed(groups: dict[str, str]) -> None:
    each = {"CPU": 1.0, "GPU": 0.0, **group_resources("learner")}
    found = await packed("learner rank", 4, each)
    ranks = [Where.options(num_cpus=1, scheduling_strategy=place(found, n)).remote() for n in range(4)]
    nodes = await asyncio.gather(*[rank.node.remote() for rank in ranks])
    assert {groups[node] for node in nodes} == {"group-learner"}
    assert len(set(nodes)) == 1  # the larger of the two holds them all
    for rank in ranks:
        ray.kill(rank)
    remove_placement_group(found)
    started = time.monotonic()
    with pytest.raises(PlacementError, match=r"no room for 7 × learner rank.*CPU 1.*free in the whole cluster"):
        await packed("learner rank", 7, each)
    assert time.monotonic() - started < PLACED_WITHIN_S + 2
    worker, rank = Part("rollout worker", 3, cpus=1.0), Part("learner rank", 2, cpus=2.0)
    await fits(Placement("cpu", "disaggregated", (worker, rank)))
    # Ten processors are there in all, but five on no node.
    with pytest.raises(PlacementError, match=r"1 × rollout worker with CPU 5\. There are: .*CPU 4"):
        await fits(Placement("cpu", "disaggregated", (Part("rollout worker", 1, cpus=5.0),)), within_s=1)


async def _beside_ranks() -> None:
    """Two engines and two ranks on two GPUs (Ray's: no process here uses one): a pair each, also after an engine was replaced."""
    config = presets.load("single-gpu-1.5b", ["rollout.workers=2", "learner.ranks=2"])
    ranks = await packed("learner rank", 2, {"CPU": 2.0, "GPU": 1.0})
    places = EnginePlaces(config, on_gpu=True, resources={}, ranks=ranks)

    def started(index: int) -> object:
        return Where.options(num_cpus=1, num_gpus=0.5, scheduling_strategy=place(ranks, index)).remote()

    engines = {name: await places.take(name) for name in ("rollout-0", "rollout-1")}
    actors = [started(0), started(1), *(started(each.index) for each in engines.values() if each is not None)]
    gpus = [await actor.gpu.remote() for actor in actors]  # type: ignore[attr-defined]
    assert gpus[:2] == gpus[2:] and gpus[0] != gpus[1]
    places.give_back("rollout-0")
    again = await places.take("rollout-2")
    assert again is not None and (again.index, again.whole) == (0, False)
    for actor in actors:
        ray.kill(actor)
    remove_placement_group(ranks)


async def _over_nodes() -> None:
    """No node has five processors for one engine; two nodes have them together, and give them back."""
    config = presets.load("quickstart-cpu", ["engine.tensor_parallel=2", "engine.nodes=2", "engine.cpu_threads=4"])
    places = EnginePlaces(config, on_gpu=False, resources={})
    found = await places.take("rollout-0")
    assert found is not None and (found.index, found.whole) == (0, True)
    assert len(set(ray.util.placement_group_table(found.group)["bundles_to_node_id"].values())) == 2
    with pytest.raises(PlacementError, match=r"no room for 2 × node of engine rollout-1, each with CPU 4"):
        await places.take("rollout-1", within_s=1)
    places.give_back("rollout-0")
    await places.take("rollout-1")
    places.give_back("rollout-1")
    parts = [part for part in needed(config, "cpu").parts if part.name in ("rollout worker", "engine node")]
    assert [(part.count, part.cpus) for part in parts] == [(1, 4.0), (1, 4.0)]
    await fits(Placement("cpu", "disaggregated", tuple(parts)))
