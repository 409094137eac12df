"""Policy losses, one a file. See `registries` for what one takes and returns, `docs/algorithms.md` for which to use."""

from toolrl.algorithms.diagnostics import PolicyLoss
from toolrl.algorithms.policy_losses.cispo import cispo
from toolrl.algorithms.policy_losses.cppo import cppo
from toolrl.algorithms.policy_losses.ctpo import ctpo
from toolrl.algorithms.policy_losses.gspo import gspo
from toolrl.algorithms.policy_losses.steppo import steppo
from toolrl.algorithms.policy_losses.token import token

__all__ = ["PolicyLoss", "cispo", "cppo", "ctpo", "gspo", "steppo", "token"]
