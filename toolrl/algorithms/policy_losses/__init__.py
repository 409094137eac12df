"""Policy losses, one a file: `token`, `ctpo`. See `registries` for what one takes and returns."""

from toolrl.algorithms.diagnostics import PolicyLoss
from toolrl.algorithms.policy_losses.ctpo import ctpo
from toolrl.algorithms.policy_losses.token import token

__all__ = ["PolicyLoss", "ctpo", "token"]
