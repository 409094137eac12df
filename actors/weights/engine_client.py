"""The control plane of a trainer-driven update, in the learner's rank 0: one step on every engine at once, each with a name.

Invariants:
- Everything about one publication ends at one deadline (`begin`), whatever an engine does; an error names the engine.
- After the first failure nobody is waited for longer than `GRACE_S`: the others cannot come to an end any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from actors.weights.channel import WeightsBehind

GRACE_S = 1.0
PROBE_S = 10.0  # a busy engine answers between two of its steps


class EngineClient:
    """vLLM's `VLLMWeightSyncClient` over rollout workers, whose method `weight_step` calls `DrivenUpdate.step`."""

    def __init__(self, workers: Mapping[str, Any], *, ranks_per_engine: int, tolerant: bool = False) -> None:
        """`tolerant`: a failure makes the further steps do nothing instead of raising, for a trainer all of whose ranks must come
        to the end together; the caller looks at `failures`."""
        self.workers = dict(workers)
        self.ranks_per_engine = ranks_per_engine
        self.tolerant = tolerant
        self.version = 0  # of the publication under way: vLLM's trainers call `finish_weight_update` without one
        self.reports: dict[str, Any] = {}  # each engine's answer to the last step
        self.failures: dict[str, str] = {}  # of this publication
        self.on_failure: Callable[[], None] | None = None  # called once, in the thread that finds it
        self._until = 0.0

    def begin(self, version: int, deadline_s: float) -> None:
        """A publication begins."""
        self.version, self._until = version, time.monotonic() + deadline_s
        self.reports, self.failures = {}, {}

    def left_s(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self._until - time.monotonic())

    def leave_out_the_silent(self) -> dict[str, str]:
        """Forgets workers whose engine does not answer at all, and says why; nobody needs to wait for them in a group."""
        silent = self._answers("probe", None, min(PROBE_S, self.left_s() / 4))
        for name in silent:
            del self.workers[name]
        return silent

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("connect", places_in_group(init_info, list(self.workers), self.ranks_per_engine))

    def start_weight_update(self) -> None:
        self._all("start", self.left_s())

    def update_weights(self, update_info: Any) -> None:
        self._all("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish", int(weight_version) if weight_version is not None else self.version)

    def cancel(self, why: str) -> None:
        """Lets every engine that waits for the rest of an update go. Waits for none of them."""
        for worker in self.workers.values():
            worker.weight_step.remote("cancel", why)

    def _all(self, step: str, arguments: Any) -> None:
        """`arguments` is one for all, or for `connect` one by name. Raises WeightsBehind."""
        if self.failures and self.tolerant:
            return
        failures = self._answers(step, arguments, self.left_s())
        if not failures:
            return
        is_first, self.failures = not self.failures, self.failures | failures
        if is_first and self.on_failure is not None:
            self.on_failure()
        if not self.tolerant:
            reasons = "; ".join(f"{name}: {why}" for name, why in sorted(failures.items()))
            raise WeightsBehind(f"weights {self.version}: step {step!r} failed on {reasons}")

    def _answers(self, step: str, arguments: Any, within_s: float) -> dict[str, str]:
        """Why, for every worker that failed or was late."""
        import ray
        from ray.exceptions import RayError

        names = {
            worker.weight_step.remote(step, arguments[name] if step == "connect" else arguments): name
            for name, worker in self.workers.items()
        }
        waiting, failures = list(names), {}
        deadline = until = time.monotonic() + within_s
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, until - time.monotonic()))
            for ref in done:
                try:
                    self.reports[names[ref]] = ray.get(ref)
                except RayError as error:
                    failures[names[ref]] = str(getattr(error, "cause", None) or error).strip()
                    until = min(until, time.monotonic() + GRACE_S)
            if not done:
                break
        if time.monotonic() >= deadline or not failures:
            failures |= {names[ref]: f"no answer in {within_s:.3g} s" for ref in waiting}
        return failures


def places_in_group(init_info: Mapping[str, Any], names: list[str], ranks_per_engine: int) -> dict[str, dict[str, Any]]:
    """`init_info` for each engine by name, with `rank_offset`, where the transport has one, at the engine's first rank."""
    if "rank_offset" not in init_info:
        return {name: dict(init_info) for name in names}
    first = init_info["rank_offset"]
    return {name: {**init_info, "rank_offset": first + index * ranks_per_engine} for index, name in enumerate(names)}
