"""Log-probabilities and entropies of tokens without a sequence × vocabulary buffer.

The head runs over one piece of the rows at a time and its logits are computed again in the backward pass, so peak memory
grows with the piece, not with the length. Logits are divided by the sampling temperature and normalised in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


class _TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """(log p(target), entropy) of each row of logits [n, V]; keeps one [n, V] buffer, the probabilities.

    The logits are overwritten when they are float32: they come straight from the head, whose gradient does not need
        them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        inverse_temperature: torch.Tensor | None,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits if logits.dtype == torch.float32 else logits.float()
        if inverse_temperature is not None:
            scores.mul_(inverse_temperature[:, None])
        scores.sub_(scores.amax(-1, keepdim=True))
        probabilities = scores.exp()
        total = probabilities.sum(-1)
        log_total = total.log()
        logp = scores.gather(1, targets[:, None]).squeeze(1) - log_total
        probabilities.div_(total[:, None])
        # A score of -inf has probability 0 and adds nothing; 0 · -inf would be NaN.
        mean_score = torch.einsum("nv,nv->n", probabilities, scores.clamp_(min=torch.finfo(torch.float32).min))
        entropy = log_total - mean_score
        ctx.save_for_backward(probabilities, targets, inverse_temperature, entropy)
        ctx.dtype, ctx.entropy_gradient = logits.dtype, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities, targets, inverse_temperature, entropy = ctx.saved_tensors
        grad_logp, grad_entropy = grads
        grad = probabilities * -grad_logp[:, None]
        grad.scatter_add_(1, targets[:, None], grad_logp[:, None])
        if ctx.entropy_gradient:
            grad += grad_entropy[:, None] * (torch.special.entr(probabilities) - probabilities * entropy[:, None])
        if inverse_temperature is not None:
            grad.mul_(inverse_temperature[:, None])
        return grad.to(ctx.dtype), None, None, None


def token_logprobs(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    inverse_temperature: torch.Tensor | None = None,
    pieces: int = 1,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logp [M], entropy [M] in nats), float32.

    Args:
        head: [n, H] -> logits [n, V]; a module (its weights get their gradient).
        hidden: [M, H] states that predict the targets.
        targets: [M] token ids.
        inverse_temperature: [M] float32 factors on the logits; None: 1.
        pieces: how many even parts the rows are cut into; logits of one part exist at a time. With 1 nothing is computed
            twice.
        entropy_gradient: whether the entropy is differentiable too (costs one more [n, V] pass).
    """

    def rows(
        states: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logp, entropy = _TokenLogprobs.apply(head(states), wanted, scale, entropy_gradient)
        return logp, entropy

    if pieces == 1:
        return rows(hidden, targets, inverse_temperature)
    scales = [None] * pieces if inverse_temperature is None else inverse_temperature.tensor_split(pieces)
    parts = []
    for piece in zip(hidden.tensor_split(pieces), targets.tensor_split(pieces), scales, strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(rows, *piece, use_reentrant=False))
        else:
            parts.append(rows(*piece))
    return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])
