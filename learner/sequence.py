"""What a learner trains on: one trajectory as arrays, its masks taken from the recorded turns.

Invariants: arrays of the response have one entry a token after the prompt; `loss_mask` is a subset of `policy_mask`; a
tool token is in neither, has `turn_ids` -1 and its advantage is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolrl.algorithms.groups import counts
from toolrl.trajectory import Trajectory


@dataclass(slots=True)
class TrainSequence:
    """T tokens, R = T - prompt_length of them response."""

    token_ids: np.ndarray  # [T] int64
    prompt_length: int  # at least 1: the first response token needs a predecessor
    policy_mask: np.ndarray  # [R] bool, sampled tokens
    loss_mask: np.ndarray  # [R] bool
    rollout_logp: np.ndarray  # [R] float32, of the sampling distribution; 0 for tool tokens
    advantages: np.ndarray  # [R] float32
    turn_ids: np.ndarray  # [R] int32, -1 for tool tokens
    temperature: float = 1.0
    trajectory_id: str = ""
    group_id: str = ""

    def __post_init__(self) -> None:
        response = len(self.token_ids) - self.prompt_length
        arrays = (self.policy_mask, self.loss_mask, self.rollout_logp, self.advantages, self.turn_ids)
        where = f"sequence of trajectory {self.trajectory_id!r}"
        if self.prompt_length < 1:
            raise ValueError(f"{where}: an empty prompt; give at least one token before the response")
        if any(len(array) != response for array in arrays):
            raise ValueError(f"{where}: {response} response tokens but arrays of {[len(array) for array in arrays]}")
        if self.temperature <= 0:
            raise ValueError(f"{where}: temperature {self.temperature}; sampled tokens need one above 0")


def sequences_from(trajectories: Sequence[Trajectory], advantages: Sequence[Sequence[float]]) -> list[TrainSequence]:
    """One sequence for each trajectory that counts (see `toolrl.algorithms.groups`), in order; the others are left out.

    A trajectory whose history was rewritten gives one sequence for each segment in which the policy acted.

    Args:
        advantages: for each trajectory one number a policy turn, as `group_advantages` gives them.

    Raises:
        ValueError: a trajectory contradicts itself, or the advantages do not fit its turns.
    """
    made = []
    for trajectory, turn_advantages in zip(trajectories, advantages, strict=True):
        if not counts(trajectory):
            continue
        trajectory.check()
        if len(turn_advantages) != len(trajectory.policy_turns):
            raise ValueError(
                f"trajectory {trajectory.id}: {len(turn_advantages)} advantages for "
                f"{len(trajectory.policy_turns)} policy turns"
            )
        first = 0
        for segment in trajectory.segments():
            turns = len(segment.policy_turns)
            if any(turn.token_ids for turn in segment.policy_turns):
                made.append(_sequence(segment, turn_advantages[first : first + turns]))
            first += turns
    return made


def _sequence(trajectory: Trajectory, turn_advantages: Sequence[float]) -> TrainSequence:
    policy_mask = np.asarray(trajectory.policy_mask(), dtype=bool)
    turn_ids = np.asarray(trajectory.turn_ids(), dtype=np.int32)
    by_turn = np.asarray([*turn_advantages, 0.0], dtype=np.float32)  # index -1 serves the tool tokens
    return TrainSequence(
        token_ids=np.asarray(trajectory.token_ids, dtype=np.int64),
        prompt_length=len(trajectory.prompt_ids),
        policy_mask=policy_mask,
        loss_mask=policy_mask,
        rollout_logp=np.asarray(trajectory.rollout_logprobs(), dtype=np.float32),
        advantages=by_turn[turn_ids],
        turn_ids=turn_ids,
        temperature=trajectory.temperature,
        trajectory_id=trajectory.id,
        group_id=trajectory.group_id,
    )
