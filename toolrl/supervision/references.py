"""Trajectories that show how a task is done, by task: given ones, and good ones that the run itself made.

Invariants:
- The task is the prompt, token by token. Task ids are no key: another seed or file gives the same id to another question.
  So a reference's response always stands after the prompt that it was made for.
- Bounded: at most `max_tasks` given ones (the first stay) and `max_tasks` of the run's own (the newest stay, one a task).
- The same references in the same order give the same `sample` for the same random state, whichever process asks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from toolrl.trajectory import Outcome, Trajectory
from toolrl.trajectory_codec import decode, encode

_COLD_START_KIND = "kind"  # what `toolrl.app.cold_start_plan` drew for a trace


class References:
    """Filled with `give` and `keep`; asked with `for_task` and `sample`. Holds trajectories encoded."""

    def __init__(self, max_tasks: int = 4096) -> None:
        """`max_tasks`: of the given ones, and again of the run's own."""
        self.max_tasks = max_tasks
        self._given: dict[bytes, bytes] = {}
        self._own: dict[bytes, bytes] = {}  # oldest first

    def __len__(self) -> int:
        """Tasks with a reference."""
        return len(self._given.keys() | self._own.keys())

    def counts(self) -> tuple[int, int]:
        """Tasks with a reference, and those of them with one that the run itself made."""
        return len(self), len(self._own)

    def give(self, trajectories: Iterable[Trajectory]) -> int:
        """Takes in references from outside, the first of each task. Returns how many it took."""
        taken = 0
        for trajectory in trajectories:
            key = _key(trajectory.prompt_ids)
            if key not in self._given and len(self._given) < self.max_tasks:
                self._given[key] = encode(trajectory)
                taken += 1
        return taken

    def keep(self, trajectories: Iterable[Trajectory]) -> None:
        """Takes in good trajectories of this run; the newest of a task replaces the one before."""
        for trajectory in trajectories:
            key = _key(trajectory.prompt_ids)
            self._own.pop(key, None)
            self._own[key] = encode(trajectory)
        while len(self._own) > self.max_tasks:
            del self._own[next(iter(self._own))]

    def for_task(self, prompt_ids: Sequence[int]) -> Trajectory | None:
        """The reference of the task with this prompt: a given one before one of the run's own; None without any."""
        key = _key(prompt_ids)
        found = self._given.get(key) or self._own.get(key)
        return None if found is None else decode(found)

    def sample(self, n: int, rng: random.Random) -> list[Trajectory]:
        """`n` references of different tasks, drawn evenly; all of them, in a drawn order, where there are fewer."""
        shelf = {**self._own, **self._given}
        return [decode(shelf[key]) for key in rng.sample(list(shelf), min(n, len(shelf)))]

    def own_state(self) -> bytes:
        """The run's own references, for a checkpoint; the given ones come from where they came."""
        return msgspec.msgpack.encode(list(self._own.values()))

    def load_own_state(self, state: bytes) -> None:
        """What `own_state` gave, in place of the run's own references.

        Raises:
            CorruptTrajectory: damaged.
        """
        self._own = {}
        self.keep(decode(payload) for payload in msgspec.msgpack.decode(state, type=list[bytes]))


def solved(trajectory: Trajectory, *, full_outcome: float = 1.0) -> bool:
    """Whether it was scored as right, and not as half right; `full_outcome`: the weighted reward `outcome` of what is."""
    return trajectory.rewards.get("outcome", -1.0) >= full_outcome * (1 - 1e-6)


def is_reference(trajectory: Trajectory, *, full_outcome: float = 1.0, min_calls: int = 0) -> bool:
    """Whether a trajectory shows how its task is done: answered, every call well-formed, and right as far as is known.

    Args:
        full_outcome: the reward `outcome` of a right answer, weighted. A trajectory that was never scored is taken at its
            word, a cold start's trace if its answer is what its last call gave and no mistake was planned.
        min_calls: legal calls that it must hold.
    """
    turns = trajectory.policy_turns
    if trajectory.outcome is not Outcome.ANSWERED or any(turn.call_errors for turn in turns):
        return False
    if sum(len(turn.calls) for turn in turns) < min_calls:
        return False
    if "outcome" in trajectory.rewards:
        return solved(trajectory, full_outcome=full_outcome)
    if _COLD_START_KIND in trajectory.metadata:
        return trajectory.metadata[_COLD_START_KIND] == "solved" and _answers_with_result(trajectory)
    return True


def _answers_with_result(trajectory: Trajectory) -> bool:
    results = [result for turn in trajectory.turns for result in turn.results]
    return bool(results) and results[-1].status == "ok" and results[-1].text.strip() == trajectory.answer


def _key(prompt_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(prompt_ids, dtype="<i8").tobytes(), digest_size=16).digest()
