"""`interaction_weight`: a controller of the interaction reward, for a policy that calls its tools too seldom."""

from __future__ import annotations

from toolrl.guards.actions.action import Controls, Decision, guard_actions
from toolrl.guards.controls import REWARD_WEIGHT


@guard_actions.register("interaction_weight")
def interaction_weight(
    controls: Controls,
    decision: Decision,
    *,
    component: str = "interaction",
    growth: float = 1.5,
    least: float = 0.1,
    most: float = 2.0,
    steps: int = 5,
    fade: float = 0.9,
) -> None:
    """Multiplies the weight of `component` by `growth` at each firing, between `least` and `most`; when the rule has not
    held for `steps` steps it decays to the config's. A cool-down of one step makes it rise step by step."""
    control = REWARD_WEIGHT + component
    now = controls.value(control)
    raised = max(now, min(max(now * growth, least), most))
    controls.turn(control, raised, rule=decision.rule, step=decision.step, steps=steps, fade=fade)
