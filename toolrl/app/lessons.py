"""Supervised steps of a run: what is learnt, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

from learner.sequence import TrainSequence
from learner.turns import bare_sequences
from toolrl.trajectory import Trajectory


class Learns(Protocol):
    """The part of `actors.learner_group.LearnerGroup` that is taught."""

    async def supervised(
        self, sequences: Sequence[TrainSequence], learning_rate: float | None = None
    ) -> dict[str, float]: ...


@dataclass(frozen=True)
class Lesson:
    """Supervised steps that were taken."""

    losses: list[float]  # of each step: mean negative log-likelihood of a policy token
    references: int  # shown, over all steps

    def metrics(self, signal: str) -> dict[str, float]:
        """Named for a signal; no loss where no step was taken."""
        found = {"steps": float(len(self.losses)), "references": float(self.references)}
        if self.losses:
            found["loss"] = fmean(self.losses)
        return {f"supervision/{signal}/{name}": value for name, value in found.items()}


def supervised_sequences(trajectories: Sequence[Trajectory]) -> list[TrainSequence]:
    """Sequences for a supervised step: every policy token is learnt, at temperature 1 as in a cold start."""
    return bare_sequences([replace(each, temperature=1.0) for each in trajectories])


async def taught(
    learner: Learns,
    batches: Sequence[Sequence[Trajectory]],
    learning_rate: float | None,
    sequences_of: Callable[[Sequence[Trajectory]], list[TrainSequence]] = supervised_sequences,
) -> Lesson:
    """A supervised step on each batch.

    Args:
        learning_rate: None: the schedule's now.
        sequences_of: where not all of a trajectory's policy tokens are learnt.
    """
    losses = [(await learner.supervised(sequences_of(batch), learning_rate))["loss/supervised"] for batch in batches]
    return Lesson(losses, sum(map(len, batches)))
