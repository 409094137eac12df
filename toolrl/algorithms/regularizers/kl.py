"""KL to a frozen reference, estimated on the sampled tokens, d = logp − ref_logp (Schulman 2020, "Approximating KL
divergence"; GRPO, arXiv 2402.03300, uses k3 in the loss).

    k1 = d              k2 = d²/2              k3 = e^{−d} − 1 + d      (never negative)

`place="loss"`: the estimator is differentiated, one term a token. Its expected gradient over fresh samples is that of
KL(π_θ‖π_ref) at each token's prefix for k2, that of KL(π_ref‖π_θ) there for k3, and 0 for k1.
`place="reward"`: −β·Σ k_t of a turn's tokens becomes its turn reward `kl` before advantages are computed, and no term is left
in the loss. On undiscounted, unscaled returns (`rloo`) k1 there has the exact gradient of KL(π_θ‖π_ref) of trajectories.
Default: k3 in the loss; small models: weight 1e-3.

Traps. k1 in the loss holds nothing: it only adds noise. In the loss a token does not answer for what it leads to. The
expectations hold for fresh samples; on stale ones no importance ratio corrects them. A tool's tokens are never charged.
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
def kl_term(inputs: LossInputs, estimator: Estimator = "k3", place: Literal["loss", "reward"] = "loss") -> Term:
    """KL over the tokens of the loss.

    Raises:
        ValueError: no reference model, or KL that belongs in the reward: the learner leaves that term out.
    """
    if place != "loss":
        raise ValueError(f"regulariser 'kl' with place={place!r} is no term of the loss; known: loss, reward")
    if inputs.ref_logp is None:
        raise ValueError("regulariser 'kl' needs a reference model; give the learner one")
    return Term(kl(inputs.logp, inputs.ref_logp, inputs.loss_mask, estimator))
