"""Supervised regulariser: −mean log-probability over the supervised tokens, beside the policy loss.

    L = −Σ_{supervised} logp_t / N,   N = supervised tokens of the whole update

In the learner the supervised tokens are the loss tokens with A > 0: what turned out better than its group is also imitated
(the positive-example LM loss of VAPO, arXiv 2504.05118; weight .1 is usual there). A reference trajectory that takes part in
a group and is right has A > 0 too.

Traps. No ratio and no clip: it pulls on every such token at every step, and narrows the policy; watch the entropy. Stale
samples are imitated as they are. With whitened advantages A > 0 means better than the batch.
"""

from __future__ import annotations

import torch

from toolrl.algorithms.masks import inside
from toolrl.algorithms.registries import regularizer_registry
from toolrl.algorithms.regularizers.terms import LossInputs, Term


def sft(logp: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, T] −logp, 0 outside `mask` [B, T], the supervised tokens; `logp` [B, T] with its gradient. Take the mean with
    `aggregate(…, mask, "token_mean")`."""
    return -inside(logp, mask)


def supervised_mask(advantages: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """[B, T] bool: the loss tokens with A > 0; `advantages` [B, T]."""
    return loss_mask.bool() & (inside(advantages, loss_mask) > 0)


@regularizer_registry.register("sft")
def sft_term(inputs: LossInputs) -> Term:
    """The term on a micro-batch; N is a global count."""
    return Term(sft(inputs.logp, supervised_mask(inputs.advantages, inputs.loss_mask)), "supervised_tokens")
