"""The learner as the driver sees it: one Ray actor a DeepSpeed rank, called together, watched, stopped.

Invariants:
- Every wait has a deadline. A rank that dies, or stays silent past it, raises `LearnerLost` with its name; the other
  ranks, which would wait for it in a collective for ever, are killed, and the group is of no use from then on.
- A batch travels once into Ray's object store and is read from there by every rank.
- The group holds the actors' handles: they live as long as the group does.
- Between `make_room` and `take_room` nothing is trained, read or saved: a call that would raises.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.node_groups import PlacementGroup, group_resources, packed, place, remove_placement_group
from actors.rank_actor import RankActor
from actors.weights import Publication
from actors.weights.trainer_driven import Sent
from learner.attention_mass import Spans
from learner.sequence import TrainSequence
from learner.settings import RankSettings
from toolrl.config import RunConfig
from toolrl.errors import RunError
from toolrl.guards.actions import needs_reference
from toolrl.guards.presets import rules
from toolrl.monitors.control_tokens import ControlTokens
from toolrl.placement import gpu_fraction, takes_turns
from toolrl.weight_transport import transport_of

log = logging.getLogger(__name__)

START_DEADLINE_S = 300.0
PROBE_DEADLINE_S = 3.0
WITHOUT_ROOM = {"make_room", "take_room", "set_controls", "checksums"}  # what a rank does while engines have its memory


class LearnerLost(RunError):
    """A learner rank died, failed or stayed silent. The message names it and says what it did last."""


class LearnerGroup:
    """`await LearnerGroup.start(…)`, then `train`, `supervised`, `publish`, `save`, …, `stop`. One call at a time."""

    def __init__(
        self, actors: list[Any], step_deadline_s: float, *, ranks_per_engine: int = 1, weights_deadline_s: float = 0.0
    ) -> None:
        self.actors = actors
        self.step_deadline_s = step_deadline_s
        self.ranks_per_engine = ranks_per_engine
        self.weights_deadline_s = weights_deadline_s  # within which rank 0 gives engines up that do not take weights
        self._turn = asyncio.Lock()  # of whoever calls the ranks: all in the same order
        self._version = 0  # published last
        self._is_published = asyncio.Event()  # the weights of now were
        self.has_room = True
        self.places: PlacementGroup | None = None  # a bundle a rank; where engines share its GPU, with room for one

    @classmethod
    async def start(
        cls, config: RunConfig, model_dir: str, *, on_gpu: bool = False, control: ControlTokens | None = None
    ) -> LearnerGroup:
        """`learner.ranks` actors with their resources, the model loaded from a Hugging Face folder.

        Args:
            control: the tokens whose probabilities `train` measures too; None: none.

        Raises:
            PlacementError: the cluster has no room for the ranks; says what is missing.
            LearnerLost: a rank was not ready in time; says which.
        """
        learner = config.learner
        environment = {"OMP_NUM_THREADS": str(learner.cpu_threads), "HF_HUB_OFFLINE": "1"}
        if not on_gpu:
            environment["DS_ACCELERATOR"] = "cpu"
        cpus = 1.0 if on_gpu else float(learner.cpu_threads)
        gpus = config.placement.gpus_per_learner_rank * gpu_fraction(config) if on_gpu else 0.0
        actor_class = ray.remote(
            num_cpus=cpus,
            num_gpus=gpus,
            runtime_env={"env_vars": environment},
            concurrency_groups={"watch": 1},
            max_restarts=0,
        )(RankActor)
        settings = RankSettings(
            model_dir=model_dir,
            learner=learner,
            algorithm=config.algorithm,
            dtype=config.model.dtype,
            device="cuda" if on_gpu else "cpu",
            seed=config.seed,
            total_steps=config.loop.steps * learner.updates_per_batch,
            max_response_tokens=config.rollout.max_response_tokens,
            trust_remote_code=config.model.trust_remote_code,
            frozen=list(config.model.frozen),
            lora=config.model.lora,
            critic=config.critic,
            keep_reference=needs_reference(rule.action.name for rule in rules(config)),
            monitors=config.monitors,
            control=control,
        )
        transport = transport_of(config, "cuda" if on_gpu else "cpu")
        ranks_per_engine = config.engine.tensor_parallel * config.engine.pipeline_parallel
        group, world = (
            cls(
                [],
                learner.step_deadline_s,
                ranks_per_engine=ranks_per_engine,
                weights_deadline_s=config.weights.deadline_s,
            ),
            learner.ranks,
        )
        each = {"CPU": cpus, "GPU": gpus, **group_resources("learner")}
        if on_gpu and takes_turns(config):  # the other half of the GPU, and a processor, are an engine's
            each |= {"CPU": cpus + 1.0, "GPU": gpus + gpu_fraction(config)}
        group.places = await packed("learner rank", world, each)
        group.actors = [
            actor_class.options(scheduling_strategy=place(group.places, n)).remote(transport, config.weights)
            for n in range(world)
        ]
        try:
            first = group.actors[:1]
            ((address, port),) = await group._gather("start", [a.rendezvous.remote() for a in first], START_DEADLINE_S)
            started = [
                actor.start.remote(settings, rank, world, address, port) for rank, actor in enumerate(group.actors)
            ]
            await group._gather("start", started, START_DEADLINE_S)
        except asyncio.CancelledError:
            group._kill()
            raise
        return group

    async def train(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """One batch in `updates_per_batch` optimiser steps; metrics over all ranks.

        Raises:
            ValueError: no sequences.
            LearnerLost: see the module.
        """
        if not sequences:
            raise ValueError("train: no sequences; skip a batch in which no trajectory counts")
        metrics: dict[str, float] = (await self._change("train_batch", ray.put(list(sequences))))[0]
        if metrics["skipped_steps"]:
            records = (await self._all("skipped_steps"))[0][-int(metrics["skipped_steps"]) :]
            log.warning("optimiser steps skipped because a loss or gradient was not finite: %s", records)
        return metrics

    async def supervised(
        self, sequences: Sequence[TrainSequence], learning_rate: float | None = None
    ) -> dict[str, float]:
        """One optimiser step of supervised training; None: the schedule's rate."""
        if not sequences:
            raise ValueError("supervised: no sequences")
        answers = await self._change("supervised_batch", ray.put(list(sequences)), learning_rate)
        metrics: dict[str, float] = answers[0]
        return metrics

    async def logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """For each sequence its [R] log-probabilities under the current weights, 0 for tool tokens."""
        return await self._read("logprobs", sequences)

    async def token_statistics(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """For each sequence [P, 2]: log-probability and entropy (nats) of each of its policy tokens."""
        return await self._read("token_statistics", sequences)

    async def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """As `logprobs`, under the reference model that the regulariser `kl` brings."""
        return await self._read("reference_logprobs", sequences)

    async def values(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """For each sequence [K]: the critic's value of each of its policy turns with tokens."""
        return await self._read("values", sequences)

    async def attention_mass(
        self, sequences: Sequence[TrainSequence], spans: Sequence[Sequence[Spans]], layer: int
    ) -> list[np.ndarray]:
        """For each sequence [J, 2], one row for each of its sets of spans: the share of the attention of one layer of the policy
        that goes there when later policy tokens are predicted, and what it were if spread evenly; NaN: nothing comes later."""
        return await self._read("attention_mass", sequences, list(spans), layer)

    async def publish(self, version: int, *, checksum: bool = True) -> Publication:
        """The weights, or by `model.lora.publish` the adapter, as one publication for `WeightChannel.publish` or
        `WorkerPool.publish`."""
        async with self._turn:
            publication = await self._publish(version, checksum)
            self._version = version
            self._is_published.set()
            return publication

    async def publish_again(self, *, checksum: bool = True) -> Publication:
        """The version that was published last, in memory. While the weights are changing it waits for them to be published."""
        while True:
            await self._is_published.wait()
            async with self._turn:
                if self._is_published.is_set():
                    return await self._publish(self._version, checksum)

    async def _publish(self, version: int, checksum: bool) -> Publication:
        refs = [actor.publish.remote(version, checksum) for actor in self.actors]
        publication: Publication = (await self._gather("publish", refs, self.step_deadline_s))[0]
        return publication

    async def send(self, version: int, workers: Mapping[str, Any]) -> Sent:
        """As `publish`, over a group of rank 0 and the workers' engines; workers that fail are no fault of the learner's."""
        async with self._turn:
            told = [dict(workers), *({} for _ in self.actors[1:])]
            refs = [a.send.remote(version, w, self.ranks_per_engine) for a, w in zip(self.actors, told, strict=True)]
            sent: Sent = (await self._gather("send", refs, self.step_deadline_s + self.weights_deadline_s))[0]
            self._version = version
            self._is_published.set()
            return sent

    async def checksums(self) -> dict[str, str]:
        """Name -> SHA-256 of each weight; raises LearnerLost when ranks hold different weights."""
        answers = await self._all("checksums")
        if any(answer != answers[0] for answer in answers):
            raise LearnerLost("learner ranks hold different weights; start again from a checkpoint")
        sums: dict[str, str] = answers[0]
        return sums

    async def save(self, folder: str) -> None:
        """A checkpoint in a folder that every rank's node can reach."""
        await self._all("save_checkpoint", folder)

    async def load(self, folder: str, *, keep_counters: bool = False) -> None:
        """What `save` wrote; the same number of ranks and ZeRO stage. `keep_counters`: the schedule stays where it is."""
        await self._change("load_checkpoint", folder, keep_counters)

    async def export(self, folder: str) -> None:
        """A Hugging Face folder that transformers and vLLM load."""
        await self._all("export_hf", folder)

    async def set_controls(self, *, lr_factor: float, kl_weight: float, llds_weight: float) -> None:
        """See `LearnerRank.set_controls`; in effect from the next batch, on every rank."""
        await self._all("set_controls", lr_factor, kl_weight, llds_weight)

    async def reset_optimizer(self) -> None:
        """After a supervised start: moments forgotten, schedule from its beginning, the reference is the policy of now."""
        await self._all("reset_optimizer")
        await self._all("freeze_reference")

    async def make_room(self) -> None:
        """Leaves the memory to engines on the same GPUs, but for the weights, which can be published; see
        `learner.offloading`."""
        await self._all("make_room")
        self.has_room = False

    async def take_room(self) -> None:
        """Takes it back, to train."""
        await self._all("take_room")
        self.has_room = True

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """`LearnerRank.method(*arguments)` on every rank: the answers in rank order."""
        return await self._all(method, *arguments)

    async def stop(self) -> None:
        """Kills every rank; whatever is to be kept must have been saved."""
        self._kill()

    def _kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        if self.places is not None:
            remove_placement_group(self.places)
            self.places = None

    async def _read(self, method: str, sequences: Sequence[TrainSequence], *further: Any) -> list[np.ndarray]:
        if not sequences:
            return []
        found: dict[int, np.ndarray] = {}
        for share in await self._all(method, ray.put(list(sequences)), *further):
            found |= share
        return [found[index] for index in range(len(sequences))]

    async def _change(self, method: str, *arguments: Any) -> list[Any]:
        """As `_all`, of a method that changes the weights: until the next publication they are no version."""
        async with self._turn:
            self._is_published.clear()
            return await self._ask(method, *arguments)

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        async with self._turn:
            return await self._ask(method, *arguments)

    async def _ask(self, method: str, *arguments: Any) -> list[Any]:
        if not self.has_room and method not in WITHOUT_ROOM:
            raise RuntimeError(f"learner: {method!r} while engines have its memory; take_room first")
        refs = [actor.call.remote(method, *arguments) for actor in self.actors]
        return await self._gather(method, refs, self.step_deadline_s)

    async def _gather(self, what: str, refs: list[Any], deadline_s: float) -> list[Any]:
        futures = [asyncio.ensure_future(_value(ref)) for ref in refs]
        done, pending = await asyncio.wait(futures, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
        if pending and any(future.exception() for future in done):
            # A death breaks the collectives of the others, whose errors may arrive first: hear of the death too.
            done, pending = await asyncio.wait(futures, timeout=PROBE_DEADLINE_S)
        failed = [(rank, future) for rank, future in enumerate(futures) if future in done and future.exception()]
        if not failed and not pending:
            return [future.result() for future in futures]
        if failed:
            message, cause = _worst(what, failed)
        else:
            late = [rank for rank, future in enumerate(futures) if future in pending]
            message, cause = await self._silent(what, late, deadline_s), None
        for future in pending:
            future.cancel()
        self._kill()
        raise LearnerLost(message) from cause

    async def _silent(self, what: str, late: list[int], deadline_s: float) -> str:
        """Says which of the late ranks it hangs on: one that does not even answer, else the one that got least far."""
        probes = [
            asyncio.wait_for(
                _value(self.actors[rank].progress.options(concurrency_group="watch").remote()), PROBE_DEADLINE_S
            )
            for rank in late
        ]
        answers = await asyncio.gather(*probes, return_exceptions=True)
        known = {rank: answer for rank, answer in zip(late, answers, strict=True) if isinstance(answer, dict)}
        mute = [rank for rank in late if rank not in known]
        if not mute:
            least = min(answer["finished"] for answer in known.values())
            mute = [rank for rank, answer in known.items() if answer["finished"] == least]
        names = ", ".join(f"rank {rank}" for rank in mute)
        said = "; ".join(f"rank {rank}: {answer}" for rank, answer in known.items()) or "none of them answers"
        return (
            f"learner {names} silent: {what!r} was not finished after {deadline_s:.0f} s "
            f"({said}); look at that rank's node, or raise learner.step_deadline_s"
        )


def _worst(what: str, failed: list[tuple[int, Any]]) -> tuple[str, BaseException]:
    """The failure to report: a rank's own error or death comes before errors that follow from it elsewhere."""
    rank, future = min(failed, key=lambda pair: not isinstance(pair[1].exception(), RayActorError))
    error = future.exception()
    if isinstance(error, RayActorError):
        return f"learner rank {rank} died during {what!r}: {error}", error
    cause = error.cause if isinstance(error, RayTaskError) else error
    return f"learner rank {rank} failed during {what!r}: {type(cause).__name__}: {cause}", error


async def _value(ref: Any) -> Any:
    return await ref
