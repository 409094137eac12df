"""Which ready groups the learner gets next. A policy is a function; add one with `@sampling_policies.register("name")`
or by import path.

It gets the ready groups, those that are still being generated, how many are wanted and the learner's version, and
returns the chosen ones, or None to wait. `patient` False means that the learner has waited long enough: what is ready
must do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolrl.registry import Registry


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that may be trained, or will be once it is complete."""

    task_index: int
    ready_order: int | None  # when it became ready; None while it is generated
    oldest_version: int  # of any token in it, or that the missing ones can have


@dataclass(frozen=True, slots=True)
class Demand:
    """What the learner asks for."""

    n_groups: int
    learner_version: int
    max_staleness: int
    patient: bool = True

    def last_chance(self, candidate: Candidate) -> bool:
        """Whether the candidate is young enough for this batch and too old for the one after it.

        What is too old already has no chance to lose: it is generated anew, and nobody waits for that.
        """
        return self.learner_version - candidate.oldest_version == self.max_staleness


Policy = Callable[[Sequence[Candidate], Sequence[Candidate], Demand], list[Candidate] | None]
sampling_policies: Registry[Policy] = Registry("sampling policy")


@sampling_policies.register("fifo")
def fifo(ready: Sequence[Candidate], unfinished: Sequence[Candidate], demand: Demand) -> list[Candidate] | None:
    """In the order of issue. Waits for groups whose last chance this batch is.

    Without the waiting, groups with long episodes would arrive too late for every batch and the trained lengths would
    lean towards short ones.
    """
    ordered = sorted(ready, key=lambda group: group.task_index)
    urgent = [group for group in ordered if demand.last_chance(group)]
    if demand.patient and len(urgent) < demand.n_groups and any(demand.last_chance(group) for group in unfinished):
        return None
    others = [group for group in ordered if not demand.last_chance(group)]
    chosen = (urgent + others)[: demand.n_groups]
    return chosen if len(chosen) == demand.n_groups else None


@sampling_policies.register("freshest")
def freshest(ready: Sequence[Candidate], unfinished: Sequence[Candidate], demand: Demand) -> list[Candidate] | None:
    """The newest tokens first. Never waits for old groups, so more of them become stale, the slow ones first."""
    chosen = sorted(ready, key=lambda group: (-group.oldest_version, group.task_index))[: demand.n_groups]
    return chosen if len(chosen) == demand.n_groups else None
