"""An engine over several nodes: the rollout worker has its first, an actor of its own each further one.

vLLM's processes on all of them form one group (its multiprocessing executor with `nnodes`); those of a further node are started
and watched by an `EngineNode` there, which also has the weights ready in that node's memory.

Invariants:
- A node that dies ends the engine: `watch` raises. When the engine's worker dies, its nodes end with it: it owns them.
- No node's process goes on with new weights unless all nodes' processes have them ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from actors.engine_answers import Answers
from actors.engine_errors import EngineDied
from actors.engine_setup import environment, processes_of
from actors.weights.arrivals import Arrivals
from actors.weights.publication import Publication, this_host
from toolrl.config import EngineConfig
from toolrl.placement import gpus_of_a_node

if TYPE_CHECKING:
    from actors.node_groups import PlacementGroup

CHECK_EVERY_S = 1.0
FETCH_DEADLINE_S = 60.0


def meeting_point() -> tuple[str, int]:
    """This host's address in the cluster, and a port that is free there."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return this_host(), int(probe.getsockname()[1])


def host_variables() -> dict[str, str]:
    """For the processes of a node: where the others reach them. vLLM by itself asks the routing table, which may name another
    network."""
    return {"VLLM_HOST_IP": this_host(), "GLOO_SOCKET_IFNAME": _interface_of(this_host())}


class EngineNode:
    """The actor's body on a further node."""

    def __init__(self, name: str, processes: int) -> None:
        self.name = name
        self.processes = processes
        self._executor: Any = None
        self._arrivals = Arrivals(name, FETCH_DEADLINE_S)
        self._held = contextlib.AsyncExitStack()
        self._answers: Answers | None = None

    async def start(self, arguments: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        """Starts this node's processes and returns when the whole engine's have met and hold the model. Blocks the loop."""
        vllm_arguments = await asyncio.to_thread(importlib.import_module, "vllm.engine.arg_utils")
        executors = await asyncio.to_thread(importlib.import_module, "vllm.v1.executor.multiproc_executor")
        with environment({**variables, **host_variables()}):
            config = vllm_arguments.AsyncEngineArgs(**arguments).create_engine_config(headless=True)
            self._executor = executors.MultiprocExecutor(config)

    async def watch(self) -> None:
        """Raises EngineDied when a process of this node has ended; returns never."""
        died, loop = asyncio.Event(), asyncio.get_running_loop()
        self._executor.register_failure_callback(lambda: loop.call_soon_threadsafe(died.set))
        await died.wait()
        raise EngineDied(f"engine {self.name}: a process on {this_host()} died; its own output says why")

    async def take(self, publication: Publication) -> list[str]:
        """Paths of the publication's buckets in this node's memory, until `release`."""
        return await self._held.enter_async_context(self._arrivals.here(publication))

    async def release(self) -> None:
        await self._held.aclose()

    async def expect_answers(self) -> list[Any]:
        """Where this node's processes are to say that they have the next weights ready."""
        if self._answers is not None:
            self._answers.close()
        self._answers = Answers(self.processes)
        return self._answers.address

    async def all_good(self) -> bool:
        """Waits for the answers; whether all of them are good. False too where a process has died."""
        answers, self._answers = self._answers, None
        assert answers is not None, "all_good comes after expect_answers"
        try:
            while not await answers.all_in(CHECK_EVERY_S):
                if self._executor.is_failed:
                    return False
            return answers.good
        finally:
            answers.close()


class EngineNodes:
    """The further nodes of one engine, as its worker sees them."""

    def __init__(self, actors: list[Any], started: list[Any]) -> None:
        self._actors = actors
        self._started = started

    @classmethod
    def begin(
        cls,
        name: str,
        config: EngineConfig,
        places: PlacementGroup | None,
        arguments: Mapping[str, Any],
        variables: Mapping[str, str],
        *,
        device: Literal["cpu", "cuda"],
    ) -> EngineNodes:
        """Has the nodes start; they wait for this process's share, and `ready` for them.

        Args:
            places: one bundle a node; the first is the caller's.
        """
        import ray

        from actors.node_groups import place

        if places is None:
            raise ValueError(f"engine {name}: engine.nodes={config.nodes} needs a placement group of as many bundles")
        on_gpu = device == "cuda"
        actors = [
            ray.remote(EngineNode)
            .options(
                num_cpus=1 if on_gpu else config.cpu_threads,
                num_gpus=gpus_of_a_node(config) if on_gpu else 0,
                scheduling_strategy=place(places, index),
                runtime_env={
                    "env_vars": {"OMP_NUM_THREADS": str(config.cpu_threads), "TOKENIZERS_PARALLELISM": "false"}
                },
                max_concurrency=16,
            )
            .remote(name, processes_of(config) // config.nodes)
            for index in range(1, config.nodes)
        ]
        started = [
            actor.start.remote({**arguments, "node_rank": index}, dict(variables))
            for index, actor in enumerate(actors, 1)
        ]
        return cls(actors, started)

    async def ready(self) -> None:
        """Raises what a node met at its start."""
        await asyncio.gather(*self._started)

    async def watch(self) -> None:
        """Raises when a node, or a process there, has died; returns never."""
        await asyncio.gather(*(actor.watch.remote() for actor in self._actors))

    @contextlib.asynccontextmanager
    async def holding(self, publication: Publication) -> AsyncIterator[list[list[str]]]:
        """Inside, the publication lies in every node's memory: the paths there, node by node."""
        try:
            taken = await asyncio.gather(
                *(actor.take.remote(publication) for actor in self._actors), return_exceptions=True
            )  # all of them are done: what one still takes could not be released
            for each in taken:
                if isinstance(each, BaseException):
                    raise each
            yield [each for each in taken if not isinstance(each, BaseException)]
        finally:
            await asyncio.gather(*(actor.release.remote() for actor in self._actors))

    async def expect_answers(self) -> list[list[Any]]:
        """See `EngineNode.expect_answers`; of every node."""
        return list(await asyncio.gather(*(actor.expect_answers.remote() for actor in self._actors)))

    async def all_good(self) -> bool:
        """See `EngineNode.all_good`; of every node."""
        return all(await asyncio.gather(*(actor.all_good.remote() for actor in self._actors)))

    def stop(self) -> None:
        """Ends the nodes' processes."""
        import ray

        for actor in self._actors:
            ray.kill(actor, no_restart=True)


def _interface_of(address: str) -> str:
    """The network interface that has this address; loopback's where none is found."""
    import psutil

    for name, found in psutil.net_if_addrs().items():
        if any(each.address == address for each in found):
            return str(name)
    return "lo"
