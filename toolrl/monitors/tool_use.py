"""Whether the policy still calls its tools, on what, and what comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from toolrl.loss_masks import void_turns
from toolrl.monitors.slices import by_difficulty, by_family, calls, mean
from toolrl.trajectory import Trajectory


def tool_metrics(trained: Sequence[Trajectory], solved: Mapping[str, float]) -> dict[str, float]:
    """`tool/…` and `turns/…` of trained trajectories.

    Args:
        solved: task id -> share of right attempts, see `toolrl.monitors.slices.by_difficulty`.
    """
    results = [result for t in trained for of_turn in t.results_of_turns() for result in of_turn]
    statuses = Counter(result.status for result in results)
    metrics = {
        **_calling("", trained),
        "tool/wall_s_mean": mean(result.wall_s for result in results),
        "tool/queue_s_mean": mean(result.queue_s for result in results),
        "tool/cpu_s_mean": mean(result.cpu_s for result in results),
        "tool/output_bytes_mean": mean(result.output_bytes for result in results),
        "tool/results_after_deadline": float(sum(t.metadata.get("results_after_deadline", 0) for t in trained)),
        "tool/calls_without_result": float(sum(len(t.metadata.get("calls_without_result", ())) for t in trained)),
        "turns/mean": mean(len(t.policy_turns) for t in trained),
        "turns/void": mean(float(is_void) for t in trained for is_void in void_turns(t)),
    }
    metrics |= {f"tool/status/{status}": count / len(results) for status, count in sorted(statuses.items())}
    for name, members in by_family(trained).items():
        metrics |= _calling(f"/family/{name}", members)
    for name, members in by_difficulty(trained, solved).items():
        metrics |= _calling(f"/difficulty/{name}", members)
    return metrics


def _calling(of: str, members: Sequence[Trajectory]) -> dict[str, float]:
    return {
        f"tool/call_rate{of}": mean(float(calls(t) > 0) for t in members),
        f"tool/calls_per_trajectory{of}": mean(calls(t) for t in members),
    }
