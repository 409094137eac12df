"""`pause`: nothing more is begun or trained until somebody has looked."""

from __future__ import annotations

from toolrl.guards.actions.action import Controls, Decision, Order, guard_actions


@guard_actions.register("pause")
def pause(controls: Controls, decision: Decision, *, deadline_s: float = 86400.0) -> Order:
    """The run writes a checkpoint, admits no tasks and trains nothing until `toolrl continue RUN`; `toolrl stop RUN` ends
    it. After `deadline_s` without either it ends by itself, so that it does not hold its machines for ever."""
    return Order("pause", {"deadline_s": deadline_s})
