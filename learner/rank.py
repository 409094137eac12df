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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.activity import Activity
from learner.attention_mass import Spans
from learner.control_reading import ControlWatch, control_metrics
from learner.critic_loss import ValueRows, explained_variance
from learner.deepspeed_engine import join_process_group
from learner.evidence import ByMember, Reader
from learner.likelihoods import LikelihoodProbe, chosen_sequences, likelihood_metrics
from learner.metrics import Sums, critic_metrics, policy_metrics, step_metrics, supervised_metrics
from learner.micro_batches import MicroBatch, MicroBatches
from learner.models import Models
from learner.objective import GlobalCounts, PolicyObjective, supervised_loss
from learner.offloading import Offloading
from learner.packing import PackedBatch
from learner.planning import split_updates
from learner.sequence import TrainSequence
from learner.settings import RankSettings
from learner.steps import OptimizerSteps, SkippedStep
from learner.ulysses import RankGroups
from learner.weight_source import AdapterSource, WeightSource


class LearnerRank:
    """See the module. Methods that compute or save are collective: every rank calls them, in the same order."""

    def __init__(
        self, settings: RankSettings, *, rank: int = 0, world: int = 1, address: str = "127.0.0.1", port: int
    ) -> None:
        self.settings, self.rank, self.world = settings, rank, world
        config, device = settings.learner, torch.device(settings.device)
        if device.type == "cpu":
            torch.set_num_threads(config.cpu_threads)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(settings.seed)
        join_process_group(
            rank=rank, world=world, address=address, port=port, device=device, timeout_s=config.step_deadline_s
        )
        self.groups = RankGroups.of(config.sequence_parallel, rank=rank, world=world, timeout_s=config.step_deadline_s)
        self.objective = PolicyObjective(settings.algorithm, max_response_tokens=settings.max_response_tokens)
        needs_reference = settings.keep_reference or self.objective.needs_reference
        self.models = Models(settings, rank=rank, world=world, with_reference=needs_reference)
        self.engine, self.critic = self.models.engine, self.models.critic
        self.offloading = Offloading(self.models, config, device)
        self.activity = Activity(rank)
        self.micro_batches = MicroBatches(config, self.groups, device)
        self.reader = Reader(self.models, self.micro_batches, self.activity)
        self.steps = OptimizerSteps(self.engine, config, settings.total_steps)
        self.batches = 0

    def train_batch(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Trains on the whole batch (the same on every rank) in `updates_per_batch` optimiser steps; metrics of all
        ranks. In the first `critic.warmup_steps` batches, and in an update without a loss token, only the critic is trained.

        Raises:
            ValueError: the batch is empty, or a critic finds no targets.
        """
        if not sequences:
            raise ValueError(
                "train_batch: no sequences; a batch without a trained trajectory must not reach the learner"
            )
        targets = [sequence.value_targets for sequence in sequences if sequence.value_targets is not None]
        if self.critic is not None and len(targets) < len(sequences):
            raise ValueError("train_batch: a critic is on and a sequence has no value_targets; read `values` first")
        started = (time.monotonic(), time.process_time())
        resting = self.critic is not None and self.batches < self.settings.critic.warmup_steps
        names = [sequence.group_id or sequence.trajectory_id for sequence in sequences]
        updates = split_updates(names, self.settings.learner.updates_per_batch, self.settings.seed + self.batches)
        parts = [[sequences[index] for index in update] for update in updates]
        micros = [self.micro_batches.of(part) for part in parts]
        sums, rate, empty = Sums(), 0.0, 0
        watch = self._watch()
        old = [
            None if resting or not update else self.reader.by_policy(part, watch) for update, part in enumerate(micros)
        ]
        probe = None if resting else self._likelihood_probe(sequences)
        references = iter(self._references([micro.batch for part in micros for micro in part]))
        steps: list[tuple[float, bool]] = []
        critic_steps: list[tuple[float, bool]] = []
        for part, batches, old_logps in zip(parts, micros, old, strict=True):
            counts = GlobalCounts.of(part)
            rests = resting or not counts.loss_tokens
            for index, micro in enumerate(batches):
                old_logp = None if old_logps is None else old_logps[index]
                self._train_on(micro, old_logp, next(references), counts, sums, rests, watch)
            if self.critic is not None:
                # A gradient that came through the engine was multiplied there, for its mean over ranks.
                joined = self.critic.joins_policy and not rests
                critic_steps.append(self.critic.take_step(1 / self.world if joined else 1.0))
            if not rests:
                rate = self.steps.rate()
                steps.append(self.steps.take(rate, part, float(sums.totals["policy_loss"])))
            empty += not counts.loss_tokens
        self.batches += 1
        if watch is not None:
            watch.tell(sums)
        if probe is not None:
            probe.add(sums)
        summed = sums.over_ranks(self.groups)
        metrics = policy_metrics(summed, len(parts)) | step_metrics(sequences, steps, rate, empty)
        if self.critic is not None:
            metrics |= critic_metrics(summed, len(parts), explained_variance(targets), critic_steps)
            metrics["alarm/nonfinite"] = max(metrics["alarm/nonfinite"], float(metrics["critic/skipped_steps"] > 0))
        if self.settings.control is not None:
            metrics |= control_metrics(self.settings.control, summed)
        return metrics | likelihood_metrics(summed) | self._counters(started)

    def _train_on(
        self,
        micro: MicroBatch,
        old_logp: torch.Tensor | None,
        reference: torch.Tensor | None,
        counts: GlobalCounts,
        sums: Sums,
        resting: bool,
        watch: ControlWatch | None,
    ) -> None:
        """Forward and backward of one micro-batch, for policy and critic; a resting policy is only looked at.

        Without an `old_logp` these are the weights that the batch begins with: then `watch` sees the pass.
        """
        batch, critic = micro.batch, self.critic
        rows = ValueRows.of(batch) if critic is not None else None
        wanted = rows.rows if critic is not None and rows is not None and critic.reads_policy else None
        watch = watch if old_logp is None else None
        with torch.set_grad_enabled(not resting):
            logp, entropy, *rest = self.engine(
                batch, self.objective.needs_entropy_gradient, wanted, watched=None if watch is None else watch.ids
            )
            loss = self.objective.loss(batch, logp, entropy, old_logp, reference, counts, sums)
            if watch is not None:
                watch.see(micro, entropy, rest.pop())
        self.activity.note("train")
        if critic is not None and rows is not None:
            values = critic.values(batch, rows, *rest)
            targets = [each.value_targets for each in micro.sequences if each.value_targets is not None]
            value_loss = critic.loss(values, targets, counts.turns, sums)
            if critic.joins_policy and not resting:
                loss = loss + value_loss
            else:
                critic.backward(value_loss)
        if not resting:
            self.engine.backward(loss)

    def supervised_batch(
        self, sequences: Sequence[TrainSequence], learning_rate: float | None = None
    ) -> dict[str, float]:
        """One optimiser step on the sequences' loss tokens, none where there are none; `learning_rate` replaces the
        schedule's, which stays where it is."""
        if not sequences:
            raise ValueError("supervised_batch: no sequences")
        started = (time.monotonic(), time.process_time())
        counts, sums = GlobalCounts.of(sequences), Sums()
        trains = counts.loss_tokens > 0
        for micro in self.micro_batches.of(sequences):
            with torch.set_grad_enabled(trains):
                logp, entropy = self.engine(micro.batch)
                loss = supervised_loss(micro.batch, logp, entropy, counts, sums)
            self.activity.note("supervised")
            if trains:
                self.engine.backward(loss)
        rate = self.steps.rate() if learning_rate is None else learning_rate
        loss_value = float(sums.totals["supervised_loss"])
        steps = [self.steps.take(rate, sequences, loss_value, scheduled=False)] if trains else []
        metrics = supervised_metrics(sums.over_ranks(self.groups))
        return metrics | step_metrics(sequences, steps, rate, int(not trains)) | self._counters(started)

    def logprobs(self, sequences: Sequence[TrainSequence]) -> ByMember:
        """See `Reader`; so the next three."""
        return self.reader.logprobs(sequences)

    def token_statistics(self, sequences: Sequence[TrainSequence]) -> ByMember:
        return self.reader.token_statistics(sequences)

    def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> ByMember:
        return self.reader.reference_logprobs(sequences)

    def values(self, sequences: Sequence[TrainSequence]) -> ByMember:
        return self.reader.values(sequences)

    def attention_mass(
        self, sequences: Sequence[TrainSequence], spans: Sequence[Sequence[Spans]], layer: int
    ) -> ByMember:
        return self.reader.attention_mass(sequences, spans, layer)

    def set_controls(self, lr_factor: float = 1.0, kl_weight: float = 0.0, llds_weight: float = 0.0) -> None:
        """What guards change, from the next batch on: a factor on the schedule's learning rate, and weights of KL to the
        reference and of LLDS beside the config's. Checkpoints do not hold it.

        Raises:
            ValueError: KL without a reference.
        """
        if kl_weight and self.models.reference is None:
            raise ValueError(f"set_controls: kl_weight={kl_weight} and no reference; start with keep_reference=True")
        self.steps.factor = lr_factor
        self.objective.add_weights({"kl": kl_weight, "llds": llds_weight})

    def reset_optimizer(self) -> None:
        """Forgets the optimiser's moments and starts the schedule again, as after a supervised start."""
        self.steps.start_again()

    def freeze_reference(self) -> None:
        """The reference model, and a critic that is a copy of the policy, become the policy as it is now (after a
        supervised start)."""
        self.models.freeze_reference()

    def save_checkpoint(self, folder: str | Path) -> None:
        """Models, optimisers, counters and random states, into a folder shared by all ranks."""
        self.activity.note("save")
        self.models.save(Path(folder), {"optimizer_steps": self.steps.taken, "batches": self.batches})

    def load_checkpoint(self, folder: str | Path, keep_counters: bool = False) -> None:
        """What `save_checkpoint` wrote, with the same number of ranks and the same ZeRO stage.

        Args:
            keep_counters: the schedule and the count of batches stay where they are: a run that goes back to earlier
                weights does not go back in time.
        """
        self.activity.note("load")
        counters = self.models.load(Path(folder))
        if not keep_counters:
            self.steps.taken, self.batches = counters["optimizer_steps"], counters["batches"]

    def make_room(self) -> None:
        """Leaves the GPU to engines; see `Offloading`."""
        self.activity.note("make room")
        self.offloading.make_room()

    def take_room(self) -> None:
        """Takes it back."""
        self.activity.note("take room")
        self.offloading.take_room()

    def weight_source(self) -> WeightSource:
        """All weights under their Hugging Face names, an adapter merged; iterating it is collective under ZeRO-3."""
        return self.models.weight_source()

    def published(self) -> tuple[WeightSource | AdapterSource, dict[str, Any] | None]:
        """What the engines get: the whole weights and None, or the adapter alone and its settings as peft writes them."""
        return self.models.published()

    def checksums(self) -> dict[str, str]:
        """Name -> SHA-256 of each weight's bytes."""
        return self.weight_source().checksums()

    def export_hf(self, folder: str | Path) -> None:
        """A Hugging Face folder that transformers and vLLM load, written by rank 0; an adapter in `adapter/` too."""
        self.activity.note("export")
        self.models.export(Path(folder))

    def skipped_steps(self) -> list[SkippedStep]:
        """Every step that was not applied since the start, with its trajectories."""
        return self.steps.skipped

    def pid(self) -> int:
        return os.getpid()

    def progress(self) -> dict[str, Any]:
        """What this rank does and for how long it has finished nothing; answered while a batch runs."""
        return self.activity.progress()

    def _watch(self) -> ControlWatch | None:
        control = self.settings.control
        return None if control is None else ControlWatch(control, torch.device(self.settings.device))

    def _likelihood_probe(self, sequences: Sequence[TrainSequence]) -> LikelihoodProbe | None:
        """Every `monitors.every_steps` batches, where the batch has correct sequences; the same on every rank."""
        monitors = self.settings.monitors
        if not monitors.every_steps or self.batches % monitors.every_steps:
            return None
        chosen = chosen_sequences(sequences, monitors.trajectories)
        return LikelihoodProbe(chosen, self.micro_batches, self.reader) if chosen else None

    def _references(self, batches: Sequence[PackedBatch]) -> Sequence[torch.Tensor | None]:
        """Of the reference, for a term of the loss."""
        return self.reader.by_reference(batches) if self.objective.reads_reference else [None] * len(batches)

    def _counters(self, started: tuple[float, float]) -> dict[str, float]:
        return {
            "optimizer_steps": float(self.steps.taken),
            "skipped_steps/total": float(len(self.steps.skipped)),
            "time/learn_s": time.monotonic() - started[0],
            "time/learn_processor_s": time.process_time() - started[1],
        }
