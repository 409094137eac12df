"""What of a rank's memory waits in the host's while engines generate on the same GPU: the optimiser's moments, the float32 master
weights, gradients, a critic, a reference model. The policy's own weights stay, so that they can be published at any time.

DeepSpeed (0.19) moves what is its own, under ZeRO-1 and 2 all of it (`offload_states`). Under ZeRO-3 it does so for its own
FusedAdam only, and without ZeRO not at all: there the optimiser's tensors are moved here. What `learner.offload` or
`offload_param` keep in the host's memory stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from learner.models import Models
from toolrl.config import LearnerConfig

_ALL_BUT_WEIGHTS = [state for state in OffloadStateTypeEnum if state is not OffloadStateTypeEnum.lp_params]
_GRADIENTS = [OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer]


class Offloading:
    """`make_room`, then `take_room`; both collective, both idempotent. Nothing may be trained or saved in between."""

    def __init__(self, models: Models, config: LearnerConfig, device: torch.device) -> None:
        self._models, self._device = models, device
        wanted = config.offload_while_generating
        self._moves = wanted == "always" or (wanted == "auto" and device.type == "cuda")
        self._away: list[tuple[torch.Tensor, torch.device]] = []  # tensors in the host's memory, and where they belong
        self._made = False

    def make_room(self) -> None:
        """Moves states to the host, and gives the device's memory that is not in use back to it."""
        if self._moves and not self._made:
            raw = self._models.engine.raw
            if self._deepspeed_moves(raw):
                raw.offload_states(include=self._states(raw), pin_memory=self._device.type == "cuda")
            for tensor in self._own(raw):
                self._send_away(tensor)
            self._made = True
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def take_room(self) -> None:
        """Everything back to where it was."""
        if not self._made:
            return
        raw = self._models.engine.raw
        if self._deepspeed_moves(raw):
            raw.reload_states()
        for tensor, device in self._away:
            tensor.data = tensor.data.to(device)
        self._away.clear()
        self._made = False

    def _deepspeed_moves(self, raw: Any) -> bool:
        offload = raw.zero_offload_param()  # refused by DeepSpeed where parameters are in the host's memory already
        return raw.zero_optimization_stage() > 0 and (offload is None or offload.device == "none")

    def _states(self, raw: Any) -> list[OffloadStateTypeEnum]:
        return _GRADIENTS if raw.zero_optimization_stage() == 3 else _ALL_BUT_WEIGHTS

    def _own(self, raw: Any) -> Iterator[torch.Tensor]:
        """What no call of DeepSpeed's moves."""
        if raw.zero_optimization_stage() in (0, 3):
            yield from _tensors(self._models.engine.base_optimizer)
        if raw.zero_optimization_stage() == 3:
            yield from raw.optimizer.fp32_partitioned_groups_flat
        if self._models.critic is not None:
            yield from self._models.critic.tensors()
        if self._models.reference is not None:
            yield from self._models.reference.tensors()

    def _send_away(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cpu":
            return
        self._away.append((tensor, tensor.device))
        # Pinned memory, which torch keeps for the next time: it is read and written several times as fast.
        host = torch.empty_like(tensor.data, device="cpu", pin_memory=True)
        tensor.data = host.copy_(tensor.data)


def _tensors(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
