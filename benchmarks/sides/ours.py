"""toolrl's side of `toolrl bench learner`: a step of the learner, and the floor under it.

The floor is the same forward and backward passes over the same packed micro-batches and nothing else: no loss, no metrics, no
DeepSpeed, no optimiser. Both are asked for in turn; memory is read of the step alone, which comes first.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.sides.cases import CLIP, RATE, ROWS, Case, Sample, padded_width, samples
from benchmarks.sides.process import Channel, Meter
from learner.planning import split_updates
from learner.rank import LearnerRank
from learner.sequence import TrainSequence
from learner.settings import RankSettings
from toolrl.config import AlgorithmConfig, LearnerConfig, Named


class Ours:
    """The learner with its default settings, but for what all sides share: objective, rate, clipping, updates.

    Its micro-batches hold at most what the other sides' rows do, where that is less than its default: memory is then that of
    the same room.
    """

    def __init__(self, model_dir: str, case: Case) -> None:
        made = samples(case)
        self.sequences = [sequence(index, sample) for index, sample in enumerate(made)]
        config = LearnerConfig(learning_rate=RATE, gradient_clip=CLIP, updates_per_batch=case.updates)
        config.tokens_per_micro_batch = min(config.tokens_per_micro_batch, ROWS * padded_width(made))
        objective = AlgorithmConfig(policy_loss=Named("token"), correction=None, aggregation="token_mean")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.rank = LearnerRank(RankSettings(model_dir, config, objective), port=port)

    def step(self) -> float:
        """The gradient's norm, mean over the updates."""
        return self.rank.train_batch(self.sequences)["grad/norm"]

    def floor(self) -> float:
        rank = self.rank
        names = [sequence.group_id for sequence in self.sequences]
        parts = split_updates(names, rank.settings.learner.updates_per_batch, rank.settings.seed + rank.batches)
        planned = [rank.micro_batches.of([self.sequences[index] for index in part]) for part in parts]
        packed = [[micro.batch for micro in part] for part in planned]
        for batch in (batch for part in packed[1:] for batch in part):
            with torch.no_grad():
                rank.models.policy(batch)
        for batch in (batch for part in packed for batch in part):
            rank.models.policy(batch)[0].sum().backward()
        for parameter in rank.models.policy.parameters():
            parameter.grad = None
        return 0.0


def sequence(index: int, sample: Sample) -> TrainSequence:
    """As `learner.sequence.sequences_from` would make it of the recorded turns."""
    mask = sample.mask
    return TrainSequence(
        token_ids=np.concatenate([sample.prompt, sample.response]),
        prompt_length=len(sample.prompt),
        policy_mask=mask,
        loss_mask=mask,
        rollout_logp=np.zeros(len(mask), dtype=np.float32),
        advantages=np.where(mask, sample.advantage, 0).astype(np.float32),
        turn_ids=sample.turns,
        trajectory_id=f"t{index}",
        group_id=f"g{sample.group}",
    )


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    channel = Channel()
    side: Ours | None = None
    for request in channel.requests():
        if "case" in request:
            side = None  # before the next one is made: its memory is not the next case's
            side = Ours(arguments[0], Case(**request["case"]))
            meter = Meter()
            channel.answer()
            continue
        assert side is not None
        work = side.step if request["do"] == "step" else side.floor
        meter.start()
        norm = work()
        channel.answer(norm=norm, **meter.read())


if __name__ == "__main__":
    main(sys.argv[1:])
