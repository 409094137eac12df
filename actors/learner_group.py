"""The learner as the driver sees it: one Ray actor a DeepSpeed rank, called together, watched, stopped.

Invariants:
- Every wait has a deadline. A rank that dies, or stays silent past it, raises `LearnerLost` with its name; the other
  ranks, which would wait for it in a collective for ever, are killed, and the group is of no use from then on.
- A batch travels once into Ray's object store and is read from there by every rank.
- The group holds the actors' handles: they live as long as the group does.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.weights.publication import Publication, publish
from learner.sequence import TrainSequence
from learner.settings import RankSettings
from toolrl.config import RunConfig
from toolrl.errors import RunError
from toolrl.placement import gpu_fraction

log = logging.getLogger(__name__)

START_DEADLINE_S = 300.0
PROBE_DEADLINE_S = 3.0


class LearnerLost(RunError):
    """A learner rank died, failed or stayed silent. The message names it and says what it did last."""


class RankActor:
    """The process of one rank. `progress` answers from a thread of its own while a batch runs."""

    def __init__(self) -> None:
        self.rank: Any = None

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
        """Rank 0 puts the weights into the object store; the others take part in gathering them."""
        if self.rank.rank == 0:
            return publish(self.rank.weight_source(), version, checksum=checksum)
        for _ in self.rank.weight_source():
            pass
        return None

    def progress(self) -> dict[str, Any]:
        return self.rank.progress() if self.rank is not None else {"phase": "start", "finished": 0}


class LearnerGroup:
    """`await LearnerGroup.start(…)`, then `train`, `supervised`, `publish`, `save`, …, `stop`. One call at a time."""

    def __init__(self, actors: list[Any], step_deadline_s: float) -> None:
        self.actors = actors
        self.step_deadline_s = step_deadline_s

    @classmethod
    async def start(cls, config: RunConfig, model_dir: str, *, on_gpu: bool = False) -> LearnerGroup:
        """`learner.ranks` actors with their resources, the model loaded from a Hugging Face folder.

        Raises:
            LearnerLost: a rank was not placed or not ready in time; says which.
        """
        learner = config.learner
        environment = {"OMP_NUM_THREADS": str(learner.cpu_threads), "HF_HUB_OFFLINE": "1"}
        if not on_gpu:
            environment["DS_ACCELERATOR"] = "cpu"
        actor_class = ray.remote(
            num_cpus=1 if on_gpu else learner.cpu_threads,
            num_gpus=config.placement.gpus_per_learner_rank * gpu_fraction(config) if on_gpu else 0,
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
        )
        group = cls([actor_class.remote() for _ in range(learner.ranks)], learner.step_deadline_s)
        world = learner.ranks
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
        metrics: dict[str, float] = (await self._all("train_batch", ray.put(list(sequences))))[0]
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
        answers = await self._all("supervised_batch", ray.put(list(sequences)), learning_rate)
        metrics: dict[str, float] = answers[0]
        return metrics

    async def logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """For each sequence its [R] log-probabilities under the current weights, 0 for tool tokens."""
        found: dict[int, np.ndarray] = {}
        for share in await self._all("logprobs", ray.put(list(sequences))):
            found |= share
        return [found[index] for index in range(len(sequences))]

    async def publish(self, version: int, *, checksum: bool = True) -> Publication:
        """The weights as one publication, for `WeightChannel.publish` or `WorkerPool.publish`."""
        refs = [actor.publish.remote(version, checksum) for actor in self.actors]
        publication: Publication = (await self._gather("publish", refs, self.step_deadline_s))[0]
        return publication

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

    async def load(self, folder: str) -> None:
        """What `save` wrote; the same number of ranks and ZeRO stage."""
        await self._all("load_checkpoint", folder)

    async def export(self, folder: str) -> None:
        """A Hugging Face folder that transformers and vLLM load."""
        await self._all("export_hf", folder)

    async def reset_optimizer(self) -> None:
        """After a supervised start: moments forgotten, schedule from its beginning, the reference is the policy of now."""
        await self._all("reset_optimizer")
        await self._all("freeze_reference")

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """`LearnerRank.method(*arguments)` on every rank: the answers in rank order."""
        return await self._all(method, *arguments)

    async def stop(self) -> None:
        """Kills every rank; whatever is to be kept must have been saved."""
        self._kill()

    def _kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor, no_restart=True)

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
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
