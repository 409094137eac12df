"""`kl`: pulls the policy back towards the reference, the policy as it was after the cold start."""

from __future__ import annotations

from toolrl.guards.actions.action import Controls, Decision, guard_actions, reads_reference


@guard_actions.register("kl")
@reads_reference
def kl(controls: Controls, decision: Decision, *, weight: float = 0.02, steps: int = 20, fade: float = 0.8) -> None:
    """Adds `weight` × KL to the loss, beside what the config has of it; estimator and place are those of the config's
    regulariser `kl`, k3 where there is none. It is kept for `steps` steps after the rule last held and then fades."""
    strongest = max(weight, controls.kl_weight)
    controls.turn("kl_weight", strongest, rule=decision.rule, step=decision.step, steps=steps, fade=fade)
