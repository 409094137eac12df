"""How a reward is written into a trajectory: checked and weighted, when the episode ends or long after it.

A trajectory can be finished and unrewarded: `metadata["awaited_rewards"]` then holds {name: weight} of the rewards that
are still to be delivered, each under the trajectory's `reward_id`.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from toolrl.trajectory import Trajectory

Score = float | list[float]  # of the trajectory, or [n_policy_turns]

_AWAITED = "awaited_rewards"
_NO_SPREAD = 1e-8
FULL_SCORE = 1.0 - 1e-6  # a verifier's score from here on is a right answer; a partial credit is none


def checked(score: Any, name: str, n_turns: int) -> Score:
    """The score as floats. Raises ValueError when it is no finite number or not one a turn."""
    is_list = isinstance(score, list)
    if is_list and len(score) != n_turns:
        raise ValueError(f"reward {name!r} gave {len(score)} numbers for {n_turns} policy turns")
    try:
        values = [_number(value) for value in (score if is_list else [score])]
    except (TypeError, ValueError, OverflowError) as error:
        what = f"{str(score)[:80]!r}; a reward must be a number ({type(error).__name__}: {error})"
        raise ValueError(f"reward {name!r} gave {what}") from error
    if not all(map(math.isfinite, values)):
        raise ValueError(f"reward {name!r} gave {score}; a reward must be finite")
    return values if is_list else values[0]


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group's members that count differ, so that the group can teach: their standard deviation
    (of the population) is at least 1e-8, in units of reward.

    The bound is there for rounding only: equal rewards that were summed in another order differ by some 1e-16, rewards
    that anybody means to differ by far more than 1e-8. No reward, or a single one, has no spread.
    """
    return len(rewards) > 1 and statistics.pstdev(rewards) >= _NO_SPREAD


def is_right(trajectory: Trajectory, outcome_weight: float = 1.0) -> bool:
    """Whether the answer got the verifier's full score; some verifiers give a little for the attempt.

    Args:
        outcome_weight: the weight that the component `outcome` was recorded with; with 0 nothing is known to be right.
    """
    return outcome_weight != 0 and trajectory.rewards.get("outcome", 0.0) / outcome_weight >= FULL_SCORE


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError("text is no number")
    return float(value)


def record(trajectory: Trajectory, name: str, score: Score, weight: float) -> None:
    """Writes weight × score into the trajectory's rewards, or into its policy turns'."""
    if isinstance(score, list):
        for turn, value in zip(trajectory.policy_turns, score, strict=True):
            turn.rewards[name] = weight * value
    else:
        trajectory.rewards[name] = weight * score


def reward_id(trajectory: Trajectory) -> str:
    """What a late reward is delivered for: the trajectory's id and a digest of its tokens.

    A sample that was thrown away and tried again has the id of its seat again, and other tokens: a reward that was
    worked out for the first try never reaches the second, unless both are the same to the token.
    """
    tokens = np.asarray(trajectory.token_ids, dtype="<i8").tobytes()
    return f"{trajectory.id}:{hashlib.blake2b(tokens, digest_size=6).hexdigest()}"


def awaited_rewards(trajectory: Trajectory) -> dict[str, float]:
    """{name: weight} of the rewards that are still to be delivered."""
    found: dict[str, float] = trajectory.metadata.get(_AWAITED, {})
    return found


def await_rewards(trajectory: Trajectory, weights: Mapping[str, float]) -> None:
    """Notes that these rewards are to be delivered."""
    if weights:
        trajectory.metadata[_AWAITED] = {**awaited_rewards(trajectory), **weights}


def deliver(trajectory: Trajectory, name: str, score: Any) -> None:
    """Records an awaited reward; the last one leaves no trace in the metadata.

    Raises:
        KeyError: it is not awaited.
        ValueError: see `checked`.
    """
    weight = awaited_rewards(trajectory)[name]
    record(trajectory, name, checked(score, name, len(trajectory.policy_turns)), weight)
    left = {other: each for other, each in awaited_rewards(trajectory).items() if other != name}
    if left:
        trajectory.metadata[_AWAITED] = left
    else:
        del trajectory.metadata[_AWAITED]
