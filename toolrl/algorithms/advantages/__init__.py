"""Advantages, one a file. `NAME(…)` is the mathematics over plain lists; each also registers its form over recorded
trajectories: of one group (see `groups`), or of the whole batch with evidence from the learner (see `registries.needs`)."""

from toolrl.algorithms.advantages.dr_grpo import dr_grpo
from toolrl.algorithms.advantages.gear import gear
from toolrl.algorithms.advantages.grpo import grpo
from toolrl.algorithms.advantages.gtpo import gtpo
from toolrl.algorithms.advantages.gtpo_outcome import gtpo_outcome
from toolrl.algorithms.advantages.lambda_return import lambda_return
from toolrl.algorithms.advantages.rloo import rloo
from toolrl.algorithms.advantages.steppo import steppo, steppo_returns

__all__ = ["dr_grpo", "gear", "grpo", "gtpo", "gtpo_outcome", "lambda_return", "rloo", "steppo", "steppo_returns"]
