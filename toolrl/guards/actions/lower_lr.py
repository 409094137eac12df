"""`lower_lr`: takes the learning rate down, and lets it come back when things are quiet."""

from __future__ import annotations

from toolrl.guards.actions.action import Controls, Decision, guard_actions


@guard_actions.register("lower_lr")
def lower_lr(
    controls: Controls,
    decision: Decision,
    *,
    factor: float = 0.5,
    floor: float = 0.1,
    steps: int = 50,
    fade: float = 0.9,
) -> None:
    """Multiplies the schedule's rate by `factor`, again at each firing, never below `floor` of it. It is kept for `steps`
    steps after the rule last held; then it rises back, its distance to 1 shrinking by `fade` a step."""
    lowered = max(min(floor, controls.lr_factor), controls.lr_factor * factor)
    controls.turn("lr_factor", lowered, rule=decision.rule, step=decision.step, steps=steps, fade=fade)
