"""One rank of the learner: a batch of sequences in, one or several optimiser steps, metrics out.

Every rank gets the whole batch, makes the same plan from it and computes its share, so that all ranks meet in every
collective. The result does not depend on how many ranks or micro-batches there are, beyond rounding.

`old_logp` of a batch is computed before its first step, by the same code on the same packed micro-batches; for the
first update it is the update's own log-probability, detached, which is the same number.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.checkpoint import has_reference, load_checkpoint, save_checkpoint
from learner.deepspeed_engine import DeepSpeedEngine, join_process_group
from learner.export import export_hf
from learner.metrics import Sums, policy_metrics, step_metrics, supervised_metrics
from learner.objective import GlobalCounts, PolicyObjective, supervised_loss
from learner.packing import PackedBatch, model_tokens, pack
from learner.planning import plan_micro_batches, split_updates
from learner.policy import PolicyModel, load_policy
from learner.schedule import learning_rate
from learner.sequence import TrainSequence
from learner.settings import RankSettings
from learner.weight_source import WeightSource


@dataclass(slots=True)
class SkippedStep:
    """A step that was not applied because its loss or gradient was not finite: what is needed to look into it."""

    optimizer_step: int
    loss: float
    trajectory_ids: list[str]


class LearnerRank:
    """See the module. Methods that compute or save are collective: every rank calls them, in the same order."""

    def __init__(
        self, settings: RankSettings, *, rank: int = 0, world: int = 1, address: str = "127.0.0.1", port: int
    ) -> None:
        self.settings, self.rank, self.world = settings, rank, world
        self.device = torch.device(settings.device)
        config = settings.learner
        if self.device.type == "cpu":
            torch.set_num_threads(config.cpu_threads)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(settings.seed)
        join_process_group(
            rank=rank, world=world, address=address, port=port, device=self.device, timeout_s=config.step_deadline_s
        )
        self.objective = PolicyObjective(settings.algorithm, max_response_tokens=settings.max_response_tokens)
        self.reference = self._load().requires_grad_(False).eval() if self.objective.needs_reference else None
        self.reference_moved = False  # since it was loaded from `model_dir`
        self.engine = DeepSpeedEngine(
            self._load(gradient_checkpointing=config.gradient_checkpointing), config, dtype=settings.dtype, world=world
        )
        self.optimizer_steps = 0
        self.batches = 0
        self.skipped: list[SkippedStep] = []
        self.phase = ("ready", 0, time.monotonic())  # what it does, how often something was finished, since when

    @property
    def policy(self) -> PolicyModel:
        module: PolicyModel = self.engine.module
        return module

    def train_batch(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Trains on the whole batch (the same on every rank) in `updates_per_batch` optimiser steps; metrics of all
        ranks.

        Raises:
            ValueError: the batch is empty.
        """
        if not sequences:
            raise ValueError(
                "train_batch: no sequences; a batch without a trained trajectory must not reach the learner"
            )
        started = time.monotonic()
        names = [sequence.group_id or sequence.trajectory_id for sequence in sequences]
        updates = split_updates(names, self.settings.learner.updates_per_batch, self.settings.seed + self.batches)
        parts = [[sequences[index] for index in update] for update in updates]
        packed = [self._my_batches(part) for part in parts]
        old = [None, *(self._old_logprobs(batches) for batches in packed[1:])]
        sums, norms, skipped = Sums(), [], 0
        rate = 0.0
        for part, batches, old_logps in zip(parts, packed, old, strict=True):
            counts = GlobalCounts.of(part)
            for index, batch in enumerate(batches):
                logp, entropy = self.engine(batch, self.objective.needs_entropy_gradient)
                self._note("train")
                loss = self.objective.loss(
                    batch,
                    logp,
                    entropy,
                    None if old_logps is None else old_logps[index],
                    self._reference_logprobs(batch),
                    counts,
                    sums,
                )
                self.engine.backward(loss)
            rate = self._schedule()
            norm, applied = self._step(rate, part, sums, "policy_loss")
            norms.append(norm)
            skipped += not applied
        self.batches += 1
        metrics = policy_metrics(sums.over_ranks(self.world), len(parts))
        return metrics | step_metrics(sequences, norms, skipped, rate) | self._counters(started)

    def supervised_batch(
        self, sequences: Sequence[TrainSequence], learning_rate: float | None = None
    ) -> dict[str, float]:
        """One optimiser step on the sequences' loss tokens; `learning_rate` replaces the schedule's."""
        if not sequences:
            raise ValueError("supervised_batch: no sequences")
        started = time.monotonic()
        counts, sums = GlobalCounts.of(sequences), Sums()
        for batch in self._my_batches(sequences):
            logp, entropy = self.engine(batch)
            self._note("supervised")
            self.engine.backward(supervised_loss(batch, logp, entropy, counts, sums))
        rate = self._schedule() if learning_rate is None else learning_rate
        norm, applied = self._step(rate, sequences, sums, "supervised_loss")
        metrics = supervised_metrics(sums.over_ranks(self.world))
        return metrics | step_metrics(sequences, [norm], int(not applied), rate) | self._counters(started)

    def logprobs(self, sequences: Sequence[TrainSequence]) -> dict[int, np.ndarray]:
        """This rank's share: index of the sequence -> [R] log-probabilities at its temperature, 0 for tool tokens."""
        found = {}
        for shares, batch in zip(self._plan(sequences), self._my_batches(sequences), strict=True):
            with torch.no_grad():
                grid = batch.grid(self.engine(batch)[0]).cpu().numpy()
            self._note("logprobs")
            for row, index in enumerate(shares[self.rank]):
                whole = np.zeros(len(sequences[index].policy_mask), dtype=np.float32)
                width = min(len(whole), grid.shape[1])
                whole[:width] = grid[row, :width]
                found[index] = whole
        return found

    def reset_optimizer(self) -> None:
        """Forgets the optimiser's moments and starts the schedule again, as after a supervised start."""
        self.engine.reset_optimizer()
        self.optimizer_steps = 0

    def freeze_reference(self) -> None:
        """The reference model becomes the policy as it is now (after a supervised start); nothing without a reference."""
        if self.reference is None:
            return
        frozen = dict(self.reference.causal_lm.named_parameters())
        with torch.no_grad():
            for name, tensor in self.weight_source():
                frozen[name].copy_(tensor)
        self.reference_moved = True

    def save_checkpoint(self, folder: str | Path) -> None:
        """Model, optimiser, schedule, random states and a reference that moved, into a folder shared by all ranks."""
        self._note("save")
        counters = {"optimizer_steps": self.optimizer_steps, "batches": self.batches}
        reference = self.reference.state_dict() if self.reference is not None and self.reference_moved else None
        save_checkpoint(self.engine.raw, Path(folder), counters, reference, rank=self.rank, world=self.world)

    def load_checkpoint(self, folder: str | Path) -> None:
        """What `save_checkpoint` wrote, with the same number of ranks and the same ZeRO stage."""
        self._note("load")
        counters = load_checkpoint(self.engine.raw, Path(folder), self.reference, rank=self.rank, world=self.world)
        self.reference_moved = self.reference is not None and has_reference(Path(folder))
        self.optimizer_steps, self.batches = counters["optimizer_steps"], counters["batches"]

    def weight_source(self) -> WeightSource:
        """All weights under their Hugging Face names; iterating it is collective under ZeRO-3."""
        return WeightSource(self.policy.causal_lm)

    def checksums(self) -> dict[str, str]:
        """Name -> SHA-256 of each weight's bytes."""
        return self.weight_source().checksums()

    def export_hf(self, folder: str | Path) -> None:
        """A Hugging Face folder that transformers and vLLM load, written by rank 0."""
        self._note("export")
        export_hf(self.policy.causal_lm, self.weight_source(), Path(self.settings.model_dir), Path(folder), self.rank)

    def _load(self, gradient_checkpointing: bool = False) -> PolicyModel:
        settings = self.settings
        policy = load_policy(
            Path(settings.model_dir),
            dtype=settings.dtype,
            chunk=settings.learner.logprob_chunk_tokens,
            gradient_checkpointing=gradient_checkpointing,
            trust_remote_code=settings.trust_remote_code,
        )
        policy.to(self.device)
        return policy

    def _plan(self, sequences: Sequence[TrainSequence]) -> list[list[list[int]]]:
        lengths = [model_tokens(sequence) for sequence in sequences]
        return plan_micro_batches(lengths, ranks=self.world, max_tokens=self.settings.learner.tokens_per_micro_batch)

    def _my_batches(self, sequences: Sequence[TrainSequence]) -> list[PackedBatch]:
        """This rank's micro-batches. Under ZeRO-3 every call of the head is a collective: all ranks call it equally often."""
        batches = []
        for shares in self._plan(sequences):
            batch = pack([sequences[index] for index in shares[self.rank]]).on(self.device)
            most = max(sum(int(sequences[index].policy_mask.sum()) for index in share) for share in shares)
            batch.head_pieces = max(1, -(-most // self.settings.learner.logprob_chunk_tokens))
            batches.append(batch)
        return batches

    def _old_logprobs(self, batches: Iterable[PackedBatch]) -> list[torch.Tensor]:
        found = []
        for batch in batches:
            with torch.no_grad():
                found.append(self.engine(batch)[0])
            self._note("old_logprobs")
        return found

    def _reference_logprobs(self, batch: PackedBatch) -> torch.Tensor | None:
        if self.reference is None:
            return None
        with torch.no_grad():
            return self.reference(batch)[0]

    def _schedule(self) -> float:
        config = self.settings.learner
        return learning_rate(
            self.optimizer_steps,
            base=config.learning_rate,
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
            total_steps=self.settings.total_steps,
        )

    def _step(self, rate: float, sequences: Sequence[TrainSequence], sums: Sums, loss: str) -> tuple[float, bool]:
        norm, applied = self.engine.take_step(rate)
        if applied:
            self.optimizer_steps += 1
        else:
            ids = [sequence.trajectory_id for sequence in sequences]
            self.skipped.append(SkippedStep(self.optimizer_steps, float(sums.totals[loss]), ids))
        return norm, applied

    def _counters(self, started: float) -> dict[str, float]:
        return {
            "optimizer_steps": float(self.optimizer_steps),
            "skipped_steps/total": float(len(self.skipped)),
            "time/learn_s": time.monotonic() - started,
        }

    def _note(self, phase: str) -> None:
        self.phase = (phase, self.phase[1] + 1, time.monotonic())

    def skipped_steps(self) -> list[SkippedStep]:
        """Every step that was not applied since the start, with its trajectories."""
        return self.skipped

    def pid(self) -> int:
        return os.getpid()

    def progress(self) -> dict[str, Any]:
        """What this rank does and for how long it has finished nothing; answered while a batch runs."""
        phase, finished, since = self.phase
        return {"rank": self.rank, "phase": phase, "finished": finished, "silent_s": time.monotonic() - since}
