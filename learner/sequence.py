"""What a learner trains on: one trajectory as arrays, its masks taken from the recorded turns.

Invariants: arrays of the response have one entry a token after the prompt; `loss_mask` is a subset of `policy_mask`; a
tool token is in neither, has `turn_ids` -1 and its advantage is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from toolrl.algorithms.groups import counts
from toolrl.loss_masks import Truncated, VoidTurns, turns_in_loss
from toolrl.reward_records import is_right
from toolrl.supervision.guidance import guided_by
from toolrl.trajectory import Trajectory


@dataclass(slots=True)
class ValueTargets:
    """What a critic is trained towards on one sequence: one entry a turn with tokens (K of them), in order."""

    old_values: np.ndarray  # [K] float32, V when the batch was formed
    returns: np.ndarray  # [K] float32


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
    # [R] float32 log π_old − log μ of each policy token where `rollout_logp` does not tell log μ of this sequence: 0 for a
    # reference, which no engine sampled; for a sample whose prompt held a hint, what was measured with the hint.
    engine_gap: np.ndarray | None = None
    temperature: float = 1.0
    trajectory_id: str = ""
    group_id: str = ""
    value_targets: ValueTargets | None = None
    # [R] bool: response tokens, none of the policy's, that no token after them sees; they keep their positions. To measure what
    # they were worth, never to train. (In a model with a sliding window that window counts what is left.)
    hidden: np.ndarray | None = None
    is_own: bool = True  # the policy sampled it after the task's own prompt: no reference, no hint
    is_correct: bool = False  # and it has the verifier's full score
    first_turn: int = 0  # policy turns of the trajectory before this sequence, where its history was rewritten
    valid_calls: int = 0  # tool calls of the whole trajectory that were legal, whatever they came to

    def __post_init__(self) -> None:
        response = len(self.token_ids) - self.prompt_length
        arrays = [self.policy_mask, self.loss_mask, self.rollout_logp, self.advantages, self.turn_ids]
        arrays += [array for array in (self.engine_gap, self.hidden) if array is not None]
        where = f"sequence of trajectory {self.trajectory_id!r}"
        if self.prompt_length < 1:
            raise ValueError(f"{where}: an empty prompt; give at least one token before the response")
        if any(len(array) != response for array in arrays):
            raise ValueError(f"{where}: {response} response tokens but arrays of {[len(array) for array in arrays]}")
        if self.hidden is not None and (self.hidden & self.policy_mask).any():
            raise ValueError(f"{where}: a policy token is hidden; hide tool tokens alone")
        if self.temperature <= 0:
            raise ValueError(f"{where}: temperature {self.temperature}; sampled tokens need one above 0")


def sequences_from(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Sequence[float]],
    *,
    per_token: bool = False,
    void_turns: VoidTurns = "train",
    truncated: Truncated = "train",
    outcome_weight: float = 1.0,
) -> list[TrainSequence]:
    """One sequence for each trajectory that counts (see `toolrl.algorithms.groups`), in order; the others are left out.

    A trajectory whose history was rewritten gives one sequence for each segment in which the policy acted. Turns that
    are kept out of the loss (see `toolrl.loss_masks`) stay in the sequence: the ratios of the others need them.

    Args:
        advantages: for each trajectory one number a policy turn, as `group_advantages` gives them; with `per_token` one
            number a policy token, over all its turns.
        void_turns: turns without a complete call or a final answer: `train`, `mask` or `drop_trajectory`.
        truncated: trajectories that a token budget cut off: `train` or `mask`.
        outcome_weight: the weight that the reward component `outcome` was recorded with.

    Raises:
        ValueError: a trajectory contradicts itself, or the advantages do not fit its turns or tokens.
    """
    made = []
    for trajectory, given in zip(trajectories, advantages, strict=True):
        if not counts(trajectory):
            continue
        trajectory.check()
        by_token = _by_token(trajectory, given, per_token)
        valid = sum(result.status != "invalid_call" for results in trajectory.results_of_turns() for result in results)
        in_loss = turns_in_loss(trajectory, void_turns_are=void_turns, truncated_are=truncated)
        own = guided_by(trajectory) is None
        correct = own and is_right(trajectory, outcome_weight)
        turn = token = 0
        for segment in trajectory.segments():
            turns = len(segment.policy_turns)
            tokens = sum(len(each.token_ids) for each in segment.policy_turns)
            if tokens:
                of_segment = by_token[token : token + tokens], in_loss[turn : turn + turns]
                sequence = _sequence(segment, *of_segment, valid)
                made.append(replace(sequence, is_own=own, is_correct=correct, first_turn=turn))
            turn, token = turn + turns, token + tokens
    return made


def _by_token(trajectory: Trajectory, given: Sequence[float], per_token: bool) -> np.ndarray:
    """[policy tokens] float32."""
    sizes = [len(turn.token_ids) for turn in trajectory.policy_turns]
    expected, what = (sum(sizes), "policy tokens") if per_token else (len(sizes), "policy turns")
    if len(given) != expected:
        raise ValueError(f"trajectory {trajectory.id}: {len(given)} advantages for {expected} {what}")
    values = np.asarray(given, dtype=np.float32)
    return values if per_token else np.repeat(values, sizes)


def _sequence(trajectory: Trajectory, by_token: np.ndarray, in_loss: Sequence[bool], valid: int) -> TrainSequence:
    policy_mask = np.asarray(trajectory.policy_mask(), dtype=bool)
    turn_ids = np.asarray(trajectory.turn_ids(), dtype=np.int32)
    advantages = np.zeros(len(policy_mask), dtype=np.float32)
    advantages[policy_mask] = by_token
    kept = np.asarray([*in_loss, False], dtype=bool)  # index -1 serves the tool tokens
    return TrainSequence(
        token_ids=np.asarray(trajectory.token_ids, dtype=np.int64),
        prompt_length=len(trajectory.prompt_ids),
        policy_mask=policy_mask,
        loss_mask=kept[turn_ids],
        rollout_logp=np.asarray(trajectory.rollout_logprobs(), dtype=np.float32),
        advantages=advantages,
        turn_ids=turn_ids,
        engine_gap=np.zeros(len(policy_mask), dtype=np.float32) if trajectory.oldest_version is None else None,
        temperature=trajectory.temperature,
        trajectory_id=trajectory.id,
        group_id=trajectory.group_id,
        valid_calls=valid,
    )
