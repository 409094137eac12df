"""The pessimistic clip that most policy losses end with, on whatever they call a ratio.

    L = −min(ρA, ρ̄A)                       ρ̄ is ρ within its bounds: where the bound binds, the gradient is 0
    dual clip, for A < 0:  L = min(L, −cA)   no push without bound on a token whose probability rose

Sources: Schulman et al. 2017 (arXiv 1707.06347); dual clip: Ye et al. 2020 (arXiv 1912.09729).
"""

from __future__ import annotations

import torch


def clipped_loss(
    advantage: torch.Tensor, ratio: torch.Tensor, bounded_ratio: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(L, where the bound decides it), both [B, T]."""
    plain, bounded = -advantage * ratio, -advantage * bounded_ratio
    clipped = bounded > plain  # False for NaN, which so surfaces from `plain`
    return torch.where(clipped, bounded, plain), clipped


def dual_clipped(
    loss: torch.Tensor, clipped: torch.Tensor, advantage: torch.Tensor, most: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `clipped_loss` gave, with the ceiling −cA, c = `most`, where A < 0."""
    ceiling = -advantage * most
    over = (advantage < 0) & (loss > ceiling)
    return torch.where(over, ceiling, loss), clipped | over
