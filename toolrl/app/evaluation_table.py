"""What a set of finished episodes says about a model: accuracy, avg@k, pass@k, tool use, format, by family. Pure.

Definitions, for tasks with n samples each of which c are right:
- `accuracy`: share of tasks whose first sample is right. `avg@k`: share of all samples that are right.
- `pass@k`: chance that at least one of k samples is right, 1 - C(n - c, k) / C(n, k), averaged over tasks: unbiased for
  k ≤ n (Chen et al., 2021, equation 1).
- Samples whose outcome is not the policy's (`infra_error`, `reward_missing`, …) count nowhere but in `missing`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from toolrl.reward_records import is_right
from toolrl.trajectory import Trajectory


def evaluation_table(
    trajectories: Sequence[Trajectory],
    *,
    outcome_weight: float = 1.0,
    format_state: Callable[[str, str], str] | None = None,
) -> dict[str, Any]:
    """`{"all": metrics, "by_family": {family: metrics}}`; families in alphabetical order.

    Args:
        outcome_weight: the weight that the reward component `outcome` was recorded with.
        format_state: a parser's `format_state(text, finish_reason)`; without it a turn is valid when its calls
            were read.
    """
    families: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        families.setdefault(str(trajectory.metadata.get("family", "?")), []).append(trajectory)
    measure = _Measure(outcome_weight, format_state)
    return {
        "all": measure(trajectories),
        "by_family": {family: measure(members) for family, members in sorted(families.items())},
    }


def pass_at_k(samples: int, right: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k). Raises ValueError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n."""
    if not (0 <= right <= samples and 1 <= k <= samples):
        raise ValueError(
            f"pass@{k} of {samples} samples with {right} right: needs 0 <= right <= samples, 1 <= k <= samples"
        )
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


class _Measure:
    def __init__(self, outcome_weight: float, format_state: Callable[[str, str], str] | None) -> None:
        self.outcome_weight = outcome_weight
        self.format_state = format_state

    def __call__(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        counted = [t for t in trajectories if t.outcome is not None and t.outcome.trained]
        by_task: dict[str, list[Trajectory]] = {}
        for trajectory in sorted(counted, key=lambda t: t.sample_index):
            by_task.setdefault(trajectory.task_id, []).append(trajectory)
        right = {task: [is_right(t, self.outcome_weight) for t in samples] for task, samples in by_task.items()}
        calls = [sum(len(turn.calls) for turn in t.policy_turns) for t in counted]
        results = Counter(result.status for t in counted for of_turn in t.results_of_turns() for result in of_turn)
        return {
            "tasks": len(by_task),
            "samples": len(counted),
            "missing": len(trajectories) - len(counted),
            "accuracy": _mean([samples[0] for samples in right.values()]),
            **self._at_k(right),
            "reward": _mean([t.reward for t in counted]),
            "tool_call_rate": _mean([count > 0 for count in calls]),
            "calls_per_trajectory": _mean(calls),
            "tool_failure_rate": 1 - results["ok"] / results.total() if results else 0.0,
            "format_validity": _mean([self._valid(t, n) for t in counted for n in range(len(t.policy_turns))]),
            "answered": _mean([t.answer is not None for t in counted]),
            "policy_tokens": _mean([sum(len(turn.token_ids) for turn in t.policy_turns) for t in counted]),
        }

    def _at_k(self, right: dict[str, list[bool]]) -> dict[str, float]:
        """avg@n, and pass@k for k = 1, 2, 4, … up to n, n the number of samples that every task has."""
        n = min((len(samples) for samples in right.values()), default=0)
        if n == 0:
            return {}
        ks = sorted({2**i for i in range(n.bit_length())} | {n})
        measured = {f"avg@{n}": _mean([_mean(samples) for samples in right.values()])}
        for k in ks:
            measured[f"pass@{k}"] = _mean([pass_at_k(len(s), sum(s), k) for s in right.values()])
        return measured

    def _valid(self, trajectory: Trajectory, number: int) -> bool:
        turn = trajectory.policy_turns[number]
        if self.format_state is not None:
            return self.format_state(turn.text, turn.finish_reason).startswith("healthy")
        return not turn.call_errors and turn.finish_reason != "length"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
