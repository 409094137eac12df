"""The gauges of the code interpreter, from the counters of every worker's pool; all since the workers began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_NOW = ("in_use", "waiting", "created", "create_failures", "destroyed", "unclean")


def sandbox_metrics(pools: Sequence[Mapping[str, Any]], hosts: Sequence[Mapping[str, Any]] = ()) -> dict[str, float]:
    """`sandbox/…` from `PoolStats` as mappings: totals of boxes and runs, means per run, statuses, suspicions.

    Args:
        pools: what each worker counted.
        hosts: what each sandbox host counted, where the boxes are not the workers' own.
    """
    statuses: Counter[str] = Counter()
    suspicions: Counter[str] = Counter()
    for pool in pools:
        statuses.update(pool["runs"])
        suspicions.update(pool["suspicions"])
    runs = statuses.total()

    def mean(name: str) -> float:
        return float(sum(pool[name] for pool in pools)) / max(runs, 1)

    return {
        **{f"sandbox/{name}": float(sum(owner[name] for owner in hosts or pools)) for name in _NOW},
        "sandbox/runs": float(runs),
        "sandbox/queue_s_mean": mean("queue_s"),
        "sandbox/run_s_mean": mean("wall_s"),
        "sandbox/cpu_s_mean": mean("cpu_s"),
        "sandbox/output_bytes_mean": mean("output_bytes"),
        **{f"sandbox/status/{status}": count / runs for status, count in sorted(statuses.items())},
        **{f"sandbox/suspicions/{what}": float(count) for what, count in sorted(suspicions.items())},
    }
