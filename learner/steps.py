"""The policy's optimiser steps: their schedule, their count, and those that were not applied.

A step whose loss or gradient is not finite is left out and recorded; the schedule then stands where it stood. An update
without a loss token makes no step at all: a gradient of 0 would still move the weights by the optimiser's momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from learner.deepspeed_engine import DeepSpeedEngine
from learner.schedule import learning_rate
from learner.sequence import TrainSequence
from toolrl.config import LearnerConfig


@dataclass(slots=True)
class SkippedStep:
    """A step that was not applied because its loss or gradient was not finite: what is needed to look into it."""

    optimizer_step: int
    loss: float
    trajectory_ids: list[str]


class OptimizerSteps:
    """`taken` counts the steps of the schedule that were applied since the start, `skipped` holds those that were not.

    Supervised steps stand outside the schedule: however many there are, the policy's steps have the rates they would have
    had.
    """

    def __init__(self, engine: DeepSpeedEngine, config: LearnerConfig, total_steps: int) -> None:
        """`total_steps`: optimiser steps of the run, for decaying schedules."""
        self._engine, self._config, self._total_steps = engine, config, total_steps
        self.taken = 0
        self.factor = 1.0  # on the schedule's rate, for as long as a guard keeps it
        self.skipped: list[SkippedStep] = []

    def rate(self) -> float:
        """The learning rate of the next step: the schedule's, times `factor`."""
        config = self._config
        return self.factor * learning_rate(
            self.taken,
            base=config.learning_rate,
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
            total_steps=self._total_steps,
        )

    def take(
        self, rate: float, sequences: Sequence[TrainSequence], loss: float, *, scheduled: bool = True
    ) -> tuple[float, bool]:
        """(global gradient norm before clipping, whether the step was applied); collective.

        Args:
            sequences, loss: what the accumulated gradient is of, for the record of a step that is not applied.
        """
        norm, applied = self._engine.take_step(rate)
        if applied:
            self.taken += scheduled
        else:
            self.skipped.append(SkippedStep(self.taken, loss, [sequence.trajectory_id for sequence in sequences]))
        return norm, applied

    def start_again(self) -> None:
        """Forgets the optimiser's moments and starts the schedule from its beginning, as after a supervised start."""
        self._engine.reset_optimizer()
        self.taken = 0
