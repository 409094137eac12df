"""Log-probabilities and entropies of tokens without a sequence × vocabulary buffer.

The head runs over one piece of the rows at a time and its logits are computed again in the backward pass, so peak memory
grows with the piece, not with the length: three float32 buffers of a piece's logits at most. The second time the
normaliser is known, which saves most passes over them. Logits are divided by the sampling temperature and normalised in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


class _Known:
    """What the first pass over a piece leaves for the second: with it the probabilities are one subtraction away."""

    def __init__(self) -> None:
        self.found: tuple[torch.Tensor, ...] | None = None


class _TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """(log p(target), entropy, log p(watched) [n, C]) of each row of logits [n, V]; keeps one [n, V] buffer, the probabilities
    times `total`. Nothing flows back from what is watched.

    The logits are overwritten when they are float32: they come straight from the head, whose gradient does not need
    them. With `known` the pass is one of two, and the buffer is used up by the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        inverse_temperature: torch.Tensor | None,
        entropy_gradient: bool,
        known: _Known | None,
        watched: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = logits if logits.dtype == torch.float32 else logits.float()
        if inverse_temperature is not None:
            scores.mul_(inverse_temperature[:, None])
        if known is not None and known.found is not None:
            highest, total, logp, entropy, seen = known.found
            weights = scores.sub_(highest[:, None]).exp_()
        else:
            weights, *found = _first_pass(scores, targets, watched)
            highest, total, logp, entropy, seen = found
            if known is not None:
                known.found = tuple(found)
        ctx.save_for_backward(weights, total, targets, inverse_temperature, entropy)
        ctx.dtype, ctx.entropy_gradient, ctx.once = logits.dtype, entropy_gradient, known is not None
        logp, entropy, seen = logp.clone(), entropy.clone(), seen.clone()
        ctx.mark_non_differentiable(*([seen] if entropy_gradient else [entropy, seen]))
        return logp, entropy, seen

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        weights, total, targets, inverse_temperature, entropy = ctx.saved_tensors
        grad_logp, grad_entropy, _ = grads
        scale = 1.0 if inverse_temperature is None else inverse_temperature
        slope = (-grad_logp * scale / total)[:, None]
        if ctx.entropy_gradient:
            probabilities = weights / total[:, None]
            grad = probabilities * (-grad_logp * scale)[:, None]
            spread = torch.special.entr(probabilities) - probabilities * entropy[:, None]
            grad += (grad_entropy * scale)[:, None] * spread
        else:
            grad = weights.mul_(slope) if ctx.once else weights * slope
        grad.scatter_add_(1, targets[:, None], (grad_logp * scale)[:, None])
        return grad.to(ctx.dtype), None, None, None, None, None


def _first_pass(scores: torch.Tensor, targets: torch.Tensor, watched: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(weights [n, V]; their largest score, their total, logp and entropy, [n] each; log p(watched) [n, C]); the scores are
    used up."""
    highest = scores.amax(-1)
    scores.sub_(highest[:, None])
    chosen = scores.gather(1, targets[:, None]).squeeze(1)
    seen = scores.index_select(1, watched)
    weights = scores.exp()
    total = weights.sum(-1)
    # A score of -inf has probability 0 and adds nothing; 0 · -inf would be NaN.
    scores.clamp_(min=torch.finfo(torch.float32).min)
    mean_score = torch.einsum("nv,nv->n", weights, scores) / total
    log_total = total.log()
    return weights, highest, total, chosen - log_total, log_total - mean_score, seen - log_total[:, None]


def token_logprobs(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    inverse_temperature: torch.Tensor | None = None,
    pieces: int = 1,
    entropy_gradient: bool = False,
    watched: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """(logp [M], entropy [M] in nats), float32; with `watched` also (logp of each watched token [M, C]), without gradient.

    Args:
        head: [n, H] -> logits [n, V]; a module (its weights get their gradient).
        hidden: [M, H] states that predict the targets.
        targets: [M] token ids.
        inverse_temperature: [M] float32 factors on the logits; None: 1.
        pieces: how many even parts the rows are cut into; logits of one part exist at a time. With 1 nothing is computed
            twice.
        entropy_gradient: whether the entropy is differentiable too (costs one more [n, V] pass).
        watched: [C] token ids whose probabilities are read on the way, which costs next to nothing.
    """
    columns = targets.new_empty(0) if watched is None else watched

    def rows(
        states: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor | None, known: _Known | None = None
    ) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = _TokenLogprobs.apply(
            head(states), wanted, scale, entropy_gradient, known, columns
        )
        return found

    if pieces == 1:
        found = rows(hidden, targets, inverse_temperature)
        return found[:2] if watched is None else found
    scales = [None] * pieces if inverse_temperature is None else inverse_temperature.tensor_split(pieces)
    parts = []
    for piece in zip(hidden.tensor_split(pieces), targets.tensor_split(pieces), scales, strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(rows, *piece, _Known(), use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(rows(*piece))
    kinds = list(zip(*parts, strict=True))
    return tuple(torch.cat(kind) for kind in (kinds[:2] if watched is None else kinds))
