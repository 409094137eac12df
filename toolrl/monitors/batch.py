"""The metrics of one batch of trajectories: reward, tool use, format, outcomes, lengths, staleness.

What is said of the policy is said of its own samples (`toolrl.supervision.guidance`): a reference that calls its tools would
hide that the policy no longer does. Every mean is over the trained ones of them (`Outcome.trained`), those of rewards over
the ones that have all of theirs; the shares of outcomes and limits are over all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import get_args

from toolrl.monitors.batch_rewards import groups_without_signal, reward_metrics, solved_by_task
from toolrl.monitors.slices import mean
from toolrl.monitors.tool_use import tool_metrics
from toolrl.reward_records import awaited_rewards
from toolrl.supervision.guidance import own_samples
from toolrl.trajectory import LimitName, Outcome, Trajectory, staleness

LIMITS = get_args(LimitName)
FORMAT_STATES = ("healthy_call", "healthy_answer", "polluted", "collapsed")


def batch_metrics(
    trajectories: Sequence[Trajectory],
    *,
    learner_version: int,
    format_state: Callable[[str, str], str] | None = None,
    outcome_weight: float = 1.0,
    dropped_groups: int = 0,
) -> dict[str, float]:
    """Named metrics of a batch; `toolrl.monitors.known_metrics` says what each is.

    Args:
        learner_version: version of the weights that the batch is trained on; staleness is counted from it.
        format_state: a parser's `format_state(text, finish_reason)`; without it the `format/` metrics are left out.
        outcome_weight: the weight that the reward component `outcome` was recorded with.
        dropped_groups: groups that the buffer dropped since the last step because their rewards had no spread.
    """
    counted = [t for t in trajectories if t.outcome is not None and t.outcome.trained]
    trained = own_samples(counted)
    rewarded = [t for t in trained if not awaited_rewards(t)]
    ages = [staleness(t, learner_version) for t in trained]
    metrics = {
        **reward_metrics(rewarded, outcome_weight),
        "reward/awaited": mean(float(bool(awaited_rewards(t))) for t in trained),
        "signal/groups_without": groups_without_signal([t for t in counted if not awaited_rewards(t)], dropped_groups),
        **tool_metrics(trained, solved_by_task(rewarded, outcome_weight)),
        **_outcomes(own_samples(trajectories)),
        **_lengths(trained),
        **_continued(trained),
        "staleness/mean": mean(ages),
        "staleness/max": float(max(ages, default=0)),
    }
    if format_state is not None:
        metrics |= _formats(trained, format_state)
    return metrics


def _outcomes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    total = max(len(trajectories), 1)
    outcomes = Counter(t.outcome for t in trajectories)
    limits: Counter[str | None] = Counter(t.limit for t in trajectories)
    metrics = {f"outcome/{outcome.value}": outcomes[outcome] / total for outcome in Outcome}
    metrics.update({f"limit/{name}": limits[name] / total for name in LIMITS})
    return metrics


def _continued(trained: Sequence[Trajectory]) -> dict[str, float]:
    """Shares of what `actors.continuation` left in the metadata."""
    return {
        "continued/share": mean("continued_after" in t.metadata for t in trained),
        "continued/replay_changed": mean("replay_changed" in t.metadata for t in trained),
    }


def _lengths(trained: Sequence[Trajectory]) -> dict[str, float]:
    policy = [sum(len(turn.token_ids) for turn in t.policy_turns) for t in trained]
    return {
        "length/policy_mean": mean(policy),
        "length/policy_max": float(max(policy, default=0)),
        "length/total_mean": mean(len(t.token_ids) for t in trained),
        "length/truncation_rate": mean(float(t.outcome is Outcome.LENGTH) for t in trained),
    }


def _formats(trained: Sequence[Trajectory], format_state: Callable[[str, str], str]) -> dict[str, float]:
    states = Counter(format_state(turn.text, turn.finish_reason) for t in trained for turn in t.policy_turns)
    total = max(sum(states.values()), 1)
    metrics = {f"format/{state}": states[state] / total for state in FORMAT_STATES}
    metrics["format/healthy"] = metrics["format/healthy_call"] + metrics["format/healthy_answer"]
    return metrics
