"""LLDS against lazy likelihood displacement (arXiv 2512.04220): what was not wrong must not become less likely.

Δ = old_logp − logp; Y_pre = what has A ≥ 0 (0 included). For each action (policy turn) the gate is 1[Σ_k Δ_k > 0],
detached and strict. L = Σ_{Y_pre} Σ_turns gate · Σ_k relu(Δ_k) / N.
With one advantage a trajectory Y_pre is a set of trajectories, as in the paper; with turn-level advantages it is a set
of turns. LLDS-MA (`mask_answer`): tokens of the final answer weigh β = min(V/2, 1), V = mean valid tool calls a trajectory.
Defaults: weight λ = .2, gate `turn`, N = policy tokens of Y_pre (the paper; the released code divides by all).

Traps. relu, not torch.maximum: at a tie (Δ = 0) maximum leaks half a gradient. Where old_logp are the weights at the batch's
first update, as in our learner, Δ = 0 there: it acts from the second update on. Each of Y_pre's tokens counts in N, whether
its gate is open or not. In the learner a token out of the loss opens gates and counts in N, and is not held itself: a void
turn that is masked must not be preserved.
"""

from __future__ import annotations

from typing import Literal

import torch

from toolrl.algorithms.masks import inside, last_turn, per_token
from toolrl.algorithms.registries import regularizer_registry
from toolrl.algorithms.regularizers.terms import LossInputs, Term

Gate = Literal["turn", "response", "token"]


def llds(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    policy_mask: torch.Tensor,
    advantages: torch.Tensor,
    turn_ids: torch.Tensor,
    *,
    gate: Gate = "turn",
    normalize: Literal["preserved", "all"] = "preserved",
    answer_mask: torch.Tensor | None = None,
    answer_weight: float = 1.0,
) -> torch.Tensor:
    """The loss, 0-dim. All tensors [B, T] (`advantages` also [B]); `turn_ids` -1 for tool tokens.

    Args:
        gate: what must have lost likelihood as a whole before its tokens are held: the `turn`, the `response` or the
            `token`.
        normalize: N = policy tokens of Y_pre (`preserved`, the paper) or all policy tokens (`all`, the released code).
        answer_mask, answer_weight: LLDS-MA; tokens of the final answer weigh β = min(V/2, 1), V = mean valid calls a
            trajectory.
    """
    tokens = llds_tokens(logp, old_logp, policy_mask, advantages, turn_ids, gate=gate)
    if answer_mask is not None:
        tokens = torch.where(answer_mask.bool(), tokens * answer_weight, tokens)
    _check(normalize)
    counted = preserved_mask(advantages, policy_mask) if normalize == "preserved" else policy_mask.bool()
    return tokens.sum() / counted.sum().clamp(min=1)


def preserved_mask(advantages: torch.Tensor, policy_mask: torch.Tensor) -> torch.Tensor:
    """[B, T] bool: the policy tokens of Y_pre."""
    shape_like = torch.empty(policy_mask.shape, dtype=torch.float32, device=policy_mask.device)
    return policy_mask.bool() & (per_token(advantages, shape_like) >= 0)


def llds_tokens(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    policy_mask: torch.Tensor,
    advantages: torch.Tensor,
    turn_ids: torch.Tensor,
    *,
    gate: Gate = "turn",
) -> torch.Tensor:
    """[B, T] gate · relu(Δ) over Y_pre, before any normalisation."""
    lost = inside(old_logp, policy_mask).detach() - inside(logp, policy_mask)
    if gate == "turn":
        segment = torch.where(policy_mask.bool(), turn_ids.long() + 1, 0)
        sums = torch.zeros(lost.shape[0], int(segment.max()) + 1, dtype=lost.dtype, device=lost.device)
        opened = sums.scatter_add(1, segment, lost.detach()).gather(1, segment) > 0
    elif gate == "response":
        opened = (lost.detach().sum(-1, keepdim=True) > 0).expand_as(lost)
    elif gate == "token":
        opened = lost.detach() > 0
    else:
        raise ValueError(f"llds: unknown gate {gate!r}; known: turn, response, token")
    held = torch.relu(lost)
    surfaced = torch.isnan(lost.detach())  # a NaN opens no gate by comparison, and must not vanish
    return inside(held, preserved_mask(advantages, policy_mask) & (opened | surfaced))


@regularizer_registry.register("llds")
def llds_term(
    inputs: LossInputs,
    gate: Gate = "turn",
    normalize: Literal["preserved", "all"] = "preserved",
    mask_answer: bool = False,
) -> Term:
    """LLDS on a micro-batch, on the tokens of the loss; N and V are those of the whole update. `mask_answer` is LLDS-MA
    with β = min(V/2, 1)."""
    _check(normalize)
    tokens = llds_tokens(
        inputs.logp, inputs.old_logp, inputs.policy_mask, inputs.advantages, inputs.turn_ids, gate=gate
    )
    if mask_answer:
        beta = min(inputs.valid_calls / 2, 1.0)
        tokens = torch.where(last_turn(inputs.policy_mask, inputs.turn_ids), tokens * beta, tokens)
    tokens = inside(tokens, inputs.loss_mask)
    return Term(tokens, "preserved_tokens" if normalize == "preserved" else "policy_tokens")


def _check(normalize: str) -> None:
    if normalize not in ("preserved", "all"):
        raise ValueError(f"llds: unknown normalisation {normalize!r}; known: preserved, all")
