"""`llds`: holds the likelihood of preserved actions (ALGORITHMS 4.1) while it is being displaced, and no longer."""

from __future__ import annotations

from toolrl.guards.actions.action import Controls, Decision, guard_actions


@guard_actions.register("llds")
def llds(controls: Controls, decision: Decision, *, weight: float = 0.2, steps: int = 5, fade: float = 0.0) -> None:
    """Adds `weight` × LLDS to the loss, on while the rule holds and for `steps` steps after it, then off.

    LLDS acts from a batch's second update on: `learner.updates_per_batch` must be 2 or more.
    """
    strongest = max(weight, controls.llds_weight)
    controls.turn("llds_weight", strongest, rule=decision.rule, step=decision.step, steps=steps, fade=fade)
