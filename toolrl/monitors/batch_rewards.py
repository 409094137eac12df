"""What a batch earned: rewards, their components and their spread, what was solved, with calls and without."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from toolrl.monitors.slices import by_calls, by_family, by_task, mean
from toolrl.reward_records import has_spread, is_right
from toolrl.trajectory import Trajectory, groups_of


def solved_by_task(rewarded: Sequence[Trajectory], outcome_weight: float) -> dict[str, float]:
    """Task id -> share of the batch's attempts at it that were right."""
    return {task: _solve_rate(members, outcome_weight) for task, members in by_task(rewarded).items()}


def reward_metrics(rewarded: Sequence[Trajectory], outcome_weight: float) -> dict[str, float]:
    """`reward/…`, `solve_rate/…` and `interaction/…` of trained trajectories that have all their rewards.

    Args:
        outcome_weight: the weight that the component `outcome` was recorded with.
    """
    sides = by_calls(rewarded)
    metrics = {
        "reward/mean": mean(t.reward for t in rewarded),
        "reward/std": _std(rewarded),
        "solve_rate": _solve_rate(rewarded, outcome_weight),
        **{f"reward/std/{side}": _std(members) for side, members in sides.items()},
        **_components(rewarded),
        **_interaction(rewarded, outcome_weight),
    }
    if len(sides) == 2:
        with_calls, without = (mean(t.reward for t in sides[side]) for side in ("with_calls", "without_calls"))
        metrics["reward/gap_calls"] = with_calls - without
    for side, members in sides.items():
        metrics[f"solve_rate/{side}"] = _solve_rate(members, outcome_weight)
    for family, members in by_family(rewarded).items():
        metrics[f"solve_rate/family/{family}"] = _solve_rate(members, outcome_weight)
        for side, few in by_calls(members).items():
            metrics[f"solve_rate/{side}/family/{family}"] = _solve_rate(few, outcome_weight)
    return metrics


def groups_without_signal(rewarded: Sequence[Trajectory], dropped_groups: int) -> float:
    """Share of groups whose members earned the same: no advantage, nothing to learn.

    Args:
        dropped_groups: finished since the last step, and dropped by the buffer for that reason.
    """
    groups = groups_of([t for t in rewarded if any(turn.token_ids for turn in t.policy_turns)]).values()
    without = sum(not has_spread([t.reward for t in members]) for members in groups)
    return (without + dropped_groups) / max(1, len(groups) + dropped_groups)


def _components(rewarded: Sequence[Trajectory]) -> dict[str, float]:
    """Means of the components, and each one's share of all that was given and taken: a term that outgrows the outcome is
    what the policy learns to serve."""
    scores: dict[str, list[float]] = {}
    for trajectory in rewarded:
        for given in (trajectory.rewards, *(turn.rewards for turn in trajectory.turns)):
            _add(scores, given)
    sizes = {name: math.fsum(map(abs, values)) for name, values in scores.items()}
    total = math.fsum(sizes.values())
    metrics = {}
    for name in sorted(scores):
        metrics[f"reward/component/{name}"] = math.fsum(scores[name]) / len(rewarded)
        metrics[f"reward/share/{name}"] = sizes[name] / total if total else 0.0
    return metrics


def _add(scores: dict[str, list[float]], given: Mapping[str, float]) -> None:
    for name, value in given.items():
        scores.setdefault(name, []).append(value)


def _interaction(rewarded: Sequence[Trajectory], outcome_weight: float) -> dict[str, float]:
    """Whether calling helps, on the same tasks: a policy that calls on hard tasks and answers easy ones would otherwise look
    as if calls hurt."""
    tasks = [by_calls(members) for members in by_task(rewarded).values()]
    gains = [
        _solve_rate(sides["with_calls"], outcome_weight) - _solve_rate(sides["without_calls"], outcome_weight)
        for sides in tasks
        if len(sides) == 2
    ]
    found = {"interaction/tasks_both_ways": len(gains) / max(1, len(tasks))}
    return found | ({"interaction/evidence": mean(gains)} if gains else {})


def _solve_rate(members: Sequence[Trajectory], outcome_weight: float) -> float:
    return mean(float(is_right(t, outcome_weight)) for t in members)


def _std(members: Sequence[Trajectory]) -> float:
    return statistics.pstdev([t.reward for t in members]) if members else 0.0
