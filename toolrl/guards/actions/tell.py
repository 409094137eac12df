"""`tell`: says what was seen, and does nothing."""

from __future__ import annotations

from toolrl.guards.actions.action import Controls, Decision, guard_actions


@guard_actions.register("tell")
def tell(controls: Controls, decision: Decision) -> None:
    """A note on the screen and in the journal."""
