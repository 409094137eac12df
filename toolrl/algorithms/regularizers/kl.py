"""KL to a frozen reference, estimated on the sampled tokens, d = logp − ref_logp.

k1 = d (unbiased, for the reward: its gradient as a loss is 0 on average), k2 = d²/2, k3 = e^{−d} − 1 + d (never
negative).
"""

from __future__ import annotations

from typing import Literal

import torch

from toolrl.algorithms.masks import inside
from toolrl.algorithms.registries import regularizer_registry
from toolrl.algorithms.regularizers.terms import LossInputs, Term

Estimator = Literal["k1", "k2", "k3"]


def kl(logp: torch.Tensor, ref_logp: torch.Tensor, mask: torch.Tensor, estimator: Estimator = "k3") -> torch.Tensor:
    """[B, T] estimate at each token, 0 outside `mask` [B, T]; the gradient flows through `logp` [B, T] only."""
    difference = inside(logp, mask) - inside(ref_logp, mask).detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"kl: unknown estimator {estimator!r}; known: k1, k2, k3")


@regularizer_registry.register("kl")
def kl_term(inputs: LossInputs, estimator: Estimator = "k3") -> Term:
    """KL over the tokens of the loss. Raises ValueError without a reference model."""
    if inputs.ref_logp is None:
        raise ValueError("regulariser 'kl' needs a reference model; give the learner one")
    return Term(kl(inputs.logp, inputs.ref_logp, inputs.loss_mask, estimator))
