"""Entropy bonus: −β·mean H over the tokens of the loss, H = −Σ_a π(a) log π(a) in nats; the regulariser's weight is β.

Off by default. Traps: it needs the entropy's own gradient, which costs a second pass over the vocabulary; of a distribution at
the sampling temperature; a weight that suits the start keeps a policy from settling at the end.
"""

from __future__ import annotations

import torch

from toolrl.algorithms.masks import inside
from toolrl.algorithms.registries import regularizer_registry
from toolrl.algorithms.regularizers.terms import LossInputs, Term


def entropy(token_entropy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, T] −H, 0 outside `mask`; `token_entropy` [B, T] in nats with its gradient."""
    return -inside(token_entropy, mask)


@regularizer_registry.register("entropy")
def entropy_term(inputs: LossInputs) -> Term:
    """The bonus over the tokens of the loss."""
    return Term(entropy(inputs.entropy, inputs.loss_mask))
