"""From a batch's sequences back to its trajectories' turns and tokens, and the other way; plain lists and arrays.

`sequences_from` makes of each trajectory that counts one sequence for each segment in which the policy acted. What the
learner says of a sequence has one entry a turn with tokens (K), or one a policy token (P).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from learner.sequence import TrainSequence, ValueTargets, sequences_from
from toolrl.algorithms.groups import counts
from toolrl.trajectory import Trajectory


def bare_sequences(trajectories: Sequence[Trajectory]) -> list[TrainSequence]:
    """Sequences to read evidence from: their advantages are 0."""
    return sequences_from(trajectories, [[0.0] * len(each.policy_turns) for each in trajectories])


def by_turn(trajectories: Sequence[Trajectory], measured: Sequence[np.ndarray]) -> list[list[float]]:
    """For each trajectory that counts one number a policy turn, from [K] of each sequence.

    A turn without a token took no action: it stands where the next turn stands and gets that one's number, or 0 at the
    end of the trajectory.
    """
    found = []
    arrays = iter(measured)
    for trajectory in filter(counts, trajectories):
        row: list[float | None] = [None] * len(trajectory.policy_turns)
        for turns in _turns_of_sequences(trajectory):
            for turn, value in zip(turns, next(arrays), strict=True):
                row[turn] = float(value)
        ahead = 0.0
        filled = []
        for value in reversed(row):
            ahead = ahead if value is None else value
            filled.append(ahead)
        found.append(filled[::-1])
    return found


def by_token(trajectories: Sequence[Trajectory], measured: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For each trajectory that counts [P, …] over all its policy tokens, from [P, …] of each sequence."""
    arrays = iter(measured)
    return [
        np.concatenate([next(arrays) for _ in _turns_of_sequences(trajectory)])
        for trajectory in filter(counts, trajectories)
    ]


def value_targets(
    trajectories: Sequence[Trajectory], values: Sequence[Sequence[float]], returns: Sequence[Sequence[float]]
) -> list[ValueTargets]:
    """For each sequence its turns' old values and returns; both are given for each trajectory that counts."""
    found = []
    for trajectory, old, towards in zip(filter(counts, trajectories), values, returns, strict=True):
        for turns in _turns_of_sequences(trajectory):
            parts = (np.asarray([row[turn] for turn in turns], dtype=np.float32) for row in (old, towards))
            found.append(ValueTargets(*parts))
    return found


def _turns_of_sequences(trajectory: Trajectory) -> Iterator[list[int]]:
    """For each sequence of the trajectory the indices of its policy turns with tokens."""
    first = 0
    for segment in trajectory.segments():
        turns = [first + index for index, turn in enumerate(segment.policy_turns) if turn.token_ids]
        first += len(segment.policy_turns)
        if turns:
            yield turns
