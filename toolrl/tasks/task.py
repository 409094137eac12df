"""What a task is, and what a source of tasks promises.

Invariants:
- `task(index)` depends on the source's settings, its seed and `index` alone: the cursor of a run is one integer.
- No training task has the question of a held-out one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]  # {"role": …, "content": …}


@dataclass(frozen=True)
class Task:
    """One question with what its verifier needs."""

    id: str
    family: str
    messages: list[Message]  # system and user; what the episode starts from
    ground_truth: Any
    verifier: str  # a registered verifier (`math`, `reasoning_gym`) or an import path
    metadata: dict[str, Any] = field(
        default_factory=dict
    )  # `family`, `difficulty`; JSON values, copied to trajectories
    details: dict[str, Any] = field(
        default_factory=dict
    )  # what the verifier gets beside the ground truth; may be large

    @property
    def question(self) -> str:
        """The text of the last user message."""
        return str(self.messages[-1]["content"])

    @property
    def known_answer(self) -> str | None:
        """The answer as text; the first of several accepted ones. None for a ground truth that is no text or number."""
        truth = self.ground_truth
        if isinstance(truth, list) and truth:
            truth = truth[0]
        if isinstance(truth, bool) or not isinstance(truth, str | int | float):
            return None
        return str(truth).strip() or None


class TaskSource(Protocol):
    """Where the tasks of a run come from."""

    @property
    def size(self) -> int | None:
        """Training tasks in one epoch; None when tasks are made as they are asked for and never end."""

    @property
    def verifiers(self) -> list[str]:
        """The verifiers that its tasks name, so that they can be loaded before the first answer comes."""

    def task(self, index: int) -> Task:
        """The training task at `index` = 0, 1, 2, … without end (epochs follow each other, each in its own order)."""

    def held_out(self) -> list[Task]:
        """The tasks kept for evaluation, the same for every seed."""


def messages_of(question: str, system_prompt: str) -> list[Message]:
    """The opening messages of an episode; an empty system prompt leaves the system message out."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": question}]
