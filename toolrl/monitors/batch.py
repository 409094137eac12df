"""The metrics of one batch of trajectories: reward, tool use, format, outcomes, lengths, staleness.

Every mean is over the trained trajectories (`Outcome.trained`); the shares of outcomes and limits are over all.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

from toolrl.trajectory import LimitName, Outcome, ToolResult, Trajectory, staleness

LIMITS = get_args(LimitName)
FORMAT_STATES = ("healthy_call", "healthy_answer", "polluted", "collapsed")


def batch_metrics(
    trajectories: Sequence[Trajectory],
    *,
    learner_version: int,
    format_state: Callable[[str, str], str] | None = None,
) -> dict[str, float]:
    """Named metrics of a batch; see the table in docs/loop.md.

    Args:
        learner_version: version of the weights that the batch is trained on; staleness is counted from it.
        format_state: a parser's `format_state(text, finish_reason)`; without it the `format/` metrics are left out.
    """
    trained = [t for t in trajectories if t.outcome is not None and t.outcome.trained]
    metrics = {
        **_rewards(trained),
        **_tool_use(trained),
        **_outcomes(trajectories),
        **_lengths(trained),
    }
    ages = [staleness(t, learner_version) for t in trained]
    metrics["staleness/mean"] = _mean(ages)
    metrics["staleness/max"] = float(max(ages, default=0))
    if format_state is not None:
        metrics.update(_formats(trained, format_state))
    return metrics


def _rewards(trained: Sequence[Trajectory]) -> dict[str, float]:
    rewards = [t.reward for t in trained]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": statistics.pstdev(rewards) if rewards else 0.0,
        "solve_rate": _mean(_solved(t) for t in trained),
    }
    names = {name for t in trained for name in t.rewards}
    names |= {name for t in trained for turn in t.turns for name in turn.rewards}
    for name in sorted(names):
        metrics[f"reward/component/{name}"] = _mean(
            t.rewards.get(name, 0.0) + sum(turn.rewards.get(name, 0.0) for turn in t.turns) for t in trained
        )
    with_calls = [t for t in trained if _calls(t)]
    without = [t for t in trained if not _calls(t)]
    if with_calls:
        metrics["solve_rate/with_calls"] = _mean(_solved(t) for t in with_calls)
    if without:
        metrics["solve_rate/without_calls"] = _mean(_solved(t) for t in without)
    return metrics


def _tool_use(trained: Sequence[Trajectory]) -> dict[str, float]:
    results = [result for t in trained for result in _results(t)]
    statuses = Counter(result.status for result in results)
    metrics = {
        "tool/call_rate": _mean(float(_calls(t) > 0) for t in trained),
        "tool/calls_per_trajectory": _mean(_calls(t) for t in trained),
        "tool/wall_s_mean": _mean(result.wall_s for result in results),
        "tool/queue_s_mean": _mean(result.queue_s for result in results),
        "turns/mean": _mean(len(t.policy_turns) for t in trained),
    }
    metrics.update({f"tool/status/{status}": count / len(results) for status, count in sorted(statuses.items())})
    return metrics


def _outcomes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    total = max(len(trajectories), 1)
    outcomes = Counter(t.outcome for t in trajectories)
    limits: Counter[str | None] = Counter(t.limit for t in trajectories)
    metrics = {f"outcome/{outcome.value}": outcomes[outcome] / total for outcome in Outcome}
    metrics.update({f"limit/{name}": limits[name] / total for name in LIMITS})
    return metrics


def _lengths(trained: Sequence[Trajectory]) -> dict[str, float]:
    policy = [sum(len(turn.token_ids) for turn in t.policy_turns) for t in trained]
    return {
        "length/policy_mean": _mean(policy),
        "length/policy_max": float(max(policy, default=0)),
        "length/total_mean": _mean(len(t.token_ids) for t in trained),
        "length/truncation_rate": _mean(float(t.outcome is Outcome.LENGTH) for t in trained),
    }


def _formats(trained: Sequence[Trajectory], format_state: Callable[[str, str], str]) -> dict[str, float]:
    states = Counter(format_state(turn.text, turn.finish_reason) for t in trained for turn in t.policy_turns)
    total = max(sum(states.values()), 1)
    metrics = {f"format/{state}": states[state] / total for state in FORMAT_STATES}
    metrics["format/healthy"] = metrics["format/healthy_call"] + metrics["format/healthy_answer"]
    return metrics


def _solved(trajectory: Trajectory) -> float:
    return trajectory.rewards.get("outcome", 0.0)


def _calls(trajectory: Trajectory) -> int:
    return sum(len(turn.calls) for turn in trajectory.policy_turns)


def _results(trajectory: Trajectory) -> list[ToolResult]:
    return [result for turn in trajectory.turns for result in turn.results]


def _mean(values: Iterable[float]) -> float:
    collected = list(values)
    return sum(collected) / len(collected) if collected else 0.0
