"""Solvers of one step a call, for interaction-dense cold starts: `step_programs(family, question, calls, least)`.

Importing this package registers the solvers that come with toolrl.
"""

from __future__ import annotations

from toolrl.app.step_solvers import arithmetic, counting, divisors
from toolrl.app.step_solvers.steps import (
    Step,
    StepSolver,
    TooFewSteps,
    check_families,
    grows_with,
    step_programs,
    step_solvers,
)

__all__ = [
    "Step",
    "StepSolver",
    "TooFewSteps",
    "check_families",
    "grows_with",
    "step_programs",
    "step_solvers",
]

_BUILT_IN = (arithmetic, counting, divisors)  # importing them registers their solvers
