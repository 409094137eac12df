"""How a batch is cut for its metrics: by task family, by difficulty, by task, with and without calls; and means of the parts.

Sums are exact (`math.fsum`): the order of the trajectories changes no metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from toolrl.trajectory import Trajectory

Slices = dict[str, list[Trajectory]]


def mean(values: Iterable[float]) -> float:
    """0 of nothing."""
    collected = list(values)
    return math.fsum(collected) / len(collected) if collected else 0.0


def calls(trajectory: Trajectory) -> int:
    """Calls that the parser read, whatever came of them."""
    return sum(len(turn.calls) for turn in trajectory.policy_turns)


def by_family(trajectories: Iterable[Trajectory]) -> Slices:
    """By `metadata["family"]`, in alphabetical order; what has no family is in no slice."""
    named = [t for t in trajectories if t.metadata.get("family")]
    return _sliced(named, lambda t: str(t.metadata["family"]))


def by_calls(trajectories: Iterable[Trajectory]) -> Slices:
    """`with_calls` and `without_calls`, as far as there are any."""
    return _sliced(trajectories, lambda t: "with_calls" if calls(t) else "without_calls")


def by_task(trajectories: Iterable[Trajectory]) -> Slices:
    return _sliced(trajectories, lambda t: t.task_id)


def by_difficulty(trajectories: Sequence[Trajectory], solved: Mapping[str, float]) -> Slices:
    """`easy`, `medium`, `hard`: what the batch itself says of the task, because a generator's own word for it says nothing
    of this policy.

    Args:
        solved: task id -> share of the batch's attempts at it that were right: over ⅔ is easy, under ⅓ hard.
    """

    def difficulty(trajectory: Trajectory) -> str:
        share = solved[trajectory.task_id]
        return "easy" if share > 2 / 3 else "hard" if share < 1 / 3 else "medium"

    return _sliced([t for t in trajectories if t.task_id in solved], difficulty)


def _sliced(trajectories: Iterable[Trajectory], name: Callable[[Trajectory], str]) -> Slices:
    found: Slices = {}
    for trajectory in trajectories:
        found.setdefault(name(trajectory), []).append(trajectory)
    return dict(sorted(found.items()))
