"""Weights over vLLM's own GPU transports, `nccl` and `ipc`: the learner's ranks send, vLLM's trainer engine drives.

Invariants:
- An engine is not paused for ever: a trainer that falls silent between two steps is given up.
- The control plane goes to every engine with a deadline; an error names the engine. After one, all engines are
  cancelled: they answer no request until a later publication is complete.
- In the NCCL group the sending rank is 0 and the engines follow, each with its tensor-parallel ranks in a row.

A group is formed once; when an engine joins, leaves or fails it is formed anew (`connect`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Literal

from actors.engine import Engine
from actors.weights.channel import WeightsBehind


class DrivenUpdate:
    """The engine's side of such an update, step by step; one per engine, in its worker."""

    def __init__(self, engine: Engine, *, deadline_s: float = 120.0) -> None:
        self.engine = engine
        self.deadline_s = deadline_s  # a trainer that is silent for so long in the middle is given up
        self._pause: AsyncExitStack | None = None
        self._giving_up: asyncio.Task[None] | None = None

    async def step(self, name: str, argument: Any = None) -> None:
        """`connect` takes the group's settings, `update` a payload, `finish` the version, `cancel` the reason.

        Generation is paused from `start` to `finish` or `cancel`.
        """
        if self._giving_up is not None:
            self._giving_up.cancel()
        if name == "connect":
            await self.engine.connect_trainer(argument)
        elif name == "start":
            pause = AsyncExitStack()
            await pause.enter_async_context(self.engine.paused())
            self._pause = pause
            await self.engine.begin_update()
        elif name == "update":
            await self.engine.transfer(argument)
        elif name == "finish":
            await self.engine.finish_update(int(argument))
            await self._resume()
        elif name == "cancel":
            await self._cancel(str(argument))
        else:
            raise ValueError(f"engine {self.engine.name}: {name!r} is no step of a weight update")
        if self._pause is not None:
            self._giving_up = asyncio.create_task(self._give_up())

    async def _give_up(self) -> None:
        await asyncio.sleep(self.deadline_s)
        self._giving_up = None
        await self._cancel(f"their trainer was silent for {self.deadline_s:g} s in the middle of an update")

    async def _cancel(self, why: str) -> None:
        if self._pause is not None:
            try:
                await self.engine.abandon_update(why)
            finally:
                await self._resume()

    async def _resume(self) -> None:
        pause, self._pause = self._pause, None
        if pause is not None:
            await pause.aclose()


class EngineClient:
    """vLLM's `VLLMWeightSyncClient` over rollout workers, whose method `weight_step` calls `DrivenUpdate.step`."""

    def __init__(self, workers: Mapping[str, Any], *, ranks_per_engine: int, deadline_s: float) -> None:
        self.workers = dict(workers)
        self.ranks_per_engine = ranks_per_engine
        self.deadline_s = deadline_s
        self.version = 0  # of the publication under way: vLLM's trainers call `finish_weight_update` without one

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("connect", places_in_group(init_info, list(self.workers), self.ranks_per_engine))

    def start_weight_update(self) -> None:
        self._all("start", None)

    def update_weights(self, update_info: Any) -> None:
        self._all("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish", int(weight_version) if weight_version is not None else self.version)

    def cancel(self, why: str) -> None:
        """Lets every engine that waits for the rest of an update go, without weights. Waits for none of them."""
        for worker in self.workers.values():
            worker.weight_step.remote("cancel", why)

    def _all(self, step: str, arguments: Any) -> None:
        """One step on every engine. `arguments` is one for all, or for `connect` one by name."""
        import ray
        from ray.exceptions import RayError

        refs = {
            worker.weight_step.remote(step, arguments[name] if step == "connect" else arguments): name
            for name, worker in self.workers.items()
        }
        done, late = ray.wait(list(refs), num_returns=len(refs), timeout=self.deadline_s)
        failures = {refs[ref]: f"no answer in {self.deadline_s:g} s" for ref in late}
        for ref in done:
            try:
                ray.get(ref)
            except RayError as error:
                failures[refs[ref]] = str(getattr(error, "cause", error))
        if failures:
            reasons = "; ".join(f"{name}: {why}" for name, why in sorted(failures.items()))
            raise WeightsBehind(f"weights {self.version}: step {step!r} failed on {reasons}")


def places_in_group(init_info: Mapping[str, Any], names: list[str], ranks_per_engine: int) -> dict[str, dict[str, Any]]:
    """`init_info` for each engine by name, with `rank_offset`, where the transport has one, at the engine's first rank."""
    if "rank_offset" not in init_info:
        return {name: dict(init_info) for name in names}
    first = init_info["rank_offset"]
    return {name: {**init_info, "rank_offset": first + index * ranks_per_engine} for index, name in enumerate(names)}


class TrainerDrivenWeights:
    """The learner's side, on every rank; `publish` is collective. Rank 0 sends and drives the workers."""

    def __init__(self, trainer: Any, client: EngineClient) -> None:
        self._trainer = trainer
        self._client = client

    @classmethod
    def connect(
        cls,
        transport: Literal["nccl", "ipc"],
        source: Any,
        client: EngineClient,
        *,
        rank: int,
        master_address: str = "",
        master_port: int = 0,
    ) -> TrainerDrivenWeights:
        """Forms the group: `nccl` at an address and free port of rank 0's host, `ipc` on a GPU that both share."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        if transport == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            size = 1 + len(client.workers) * client.ranks_per_engine
            info: Any = NCCLTrainerInitInfo(master_address, master_port, size, rank=rank)
        else:
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            info = IPCTrainerInitInfo(packed=True, rank=rank)
        return cls(WeightTransferTrainerFactory.trainer_init(info, client=client, source=source), client)

    def publish(self, version: int) -> None:
        """Sends the source's weights to every engine.

        Raises:
            WeightsBehind: an engine failed or was late; none answers requests until a later publication is complete.
        """
        self._client.version = version
        try:
            self._trainer.send_weights()
        except BaseException as error:
            self._client.cancel(f"weights {version} were not sent whole: {error}")
            raise
