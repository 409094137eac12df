"""What a guard's action is: a function that turns controls, or asks the training loop for something.

`def NAME(controls, decision, *, option=default, …) -> Order | None`, one a file, registered under its name. Its keyword
arguments are its options in the config. It changes nothing but the controls; what needs the learner, the buffer or a
person is an `Order`, which the loop carries out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from toolrl.guards.controls import Controls
from toolrl.guards.rule import Decision
from toolrl.registry import Registry

OrderKind = Literal["reject_batch", "sft_burst", "roll_back", "pause"]


@dataclass(frozen=True)
class Order:
    """Something that the training loop is to do before its next batch."""

    kind: OrderKind
    options: Mapping[str, Any] = field(default_factory=dict)


# Actions that put right what is still in the ordinary course; all others answer a collapse.
CORRECTIONS = frozenset({"interaction_weight", "kl", "llds", "lower_lr", "tell"})

Action = Callable[..., Order | None]  # (controls: Controls, decision: Decision, **options)
Marked = TypeVar("Marked", bound=Action)

guard_actions: Registry[Action] = Registry("guard action")


def reads_reference(action: Marked) -> Marked:
    """Marks an action that gives KL to the reference a weight: the learner then loads a reference from the start. Written
    below `register`."""
    action.reads_reference = True  # type: ignore[attr-defined]
    return action


def needs_reference(names: Iterable[str]) -> bool:
    """Whether one of these actions is marked by `reads_reference`."""
    return any(getattr(guard_actions.get(name), "reads_reference", False) for name in names)


__all__ = [
    "CORRECTIONS",
    "Action",
    "Controls",
    "Decision",
    "Order",
    "OrderKind",
    "guard_actions",
    "needs_reference",
    "reads_reference",
]
