"""AdamW that clips by the global norm and leaves out a step whose gradient is not finite, as ZeRO's optimisers do by
themselves.

For plain float32 without ZeRO, where DeepSpeed applies whatever gradient it gets. DeepSpeed reads `overflow` and
`_global_grad_norm` of any optimiser that has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class CheckedAdamW(torch.optim.AdamW):  # type: ignore[misc]  # torch is untyped here
    """`clip` is the largest global gradient norm; 0: no bound."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, clip: float, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.clip = clip if clip > 0 else float("inf")
        self.overflow = False
        self._global_grad_norm = 0.0

    def step(self, closure: None = None) -> None:
        """One step on gradients that are the same on every rank."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._global_grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.clip))
        self.overflow = not self._global_grad_norm < float("inf")  # NaN too
        if not self.overflow:
            super().step()
