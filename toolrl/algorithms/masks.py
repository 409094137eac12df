"""Masked tensors: what is outside a mask never reaches a value or a gradient, what is inside is left as it is.

A value at mask 0 is replaced before any arithmetic (0 · NaN is NaN), so a NaN or an infinity there stays out of the
loss and of the gradient; a NaN at mask 1 surfaces. Log-probabilities of 16 bits are widened: sums over logs run in
float32 or better.
"""

from __future__ import annotations

import torch


def inside(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` where `mask` is not 0, an exact 0 elsewhere; at least float32."""
    wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
    return torch.where(mask.bool(), wide, torch.zeros((), dtype=wide.dtype, device=wide.device))


def loss_mask_of(policy_mask: torch.Tensor, loss_mask: torch.Tensor | None) -> torch.Tensor:
    """[B, T] bool: the tokens that enter the loss; always a subset of the policy's tokens."""
    if loss_mask is None:
        return policy_mask.bool()
    return policy_mask.bool() & loss_mask.bool()


def per_token(advantages: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[B, T] advantages from [B, T] or [B] ones, in the dtype of `like` [B, T].

    Raises:
        ValueError: neither shape fits.
    """
    if advantages.dim() == 1 and like.dim() == 2 and advantages.shape[0] == like.shape[0]:
        advantages = advantages.unsqueeze(1)
    elif advantages.shape != like.shape:
        raise ValueError(f"advantages of shape {tuple(advantages.shape)} for log-probabilities of {tuple(like.shape)}")
    return advantages.to(like.dtype).expand_as(like)


def positions(policy_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, T] τ_t = policy tokens up to and including t, over all turns, no restart (tool tokens do not count)."""
    return policy_mask.bool().to(dtype).cumsum(-1)


def last_turn(policy_mask: torch.Tensor, turn_ids: torch.Tensor) -> torch.Tensor:
    """[B, T] bool: the policy tokens of each row's last policy turn, where a final answer stands."""
    ids = torch.where(policy_mask.bool(), turn_ids.long(), -1)
    return policy_mask.bool() & (ids == ids.amax(-1, keepdim=True))
