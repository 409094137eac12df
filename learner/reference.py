"""What the policy was, for a KL term: log-probabilities by the same code and in the same type as the policy's own.

- `FrozenModel`: a model of its own, split over the ranks under ZeRO-3, else whole on each. `learner.offload_reference` keeps it
  in the host's memory, in the type it computes in, and brings it to the device for as long as a batch needs it (ZeRO-3:
  one layer at a time). On a CPU the host's memory is the device's, and the setting changes nothing.
- `FrozenAdapter`: the policy itself without its adapter, or with the adapter as it was when the reference was frozen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from learner import lora
from learner.gathering import whole, writable
from learner.packing import PackedBatch
from learner.policy import PolicyModel
from learner.settings import RankSettings
from learner.weight_source import WeightSource

FILE = "reference.pt"


class Reference(Protocol):
    """Every method is collective."""

    def __call__(self, batch: PackedBatch) -> tuple[torch.Tensor, ...]:
        """(logp [M], entropy [M]), without gradient."""

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """[M] for each batch; for many of them cheaper than one by one."""

    def freeze(self) -> None:
        """From now on the reference is the policy as it is now."""

    def save(self, folder: Path, rank: int) -> None:
        """Into a checkpoint's folder what is kept nowhere else: nothing while it is still the model that was loaded."""

    def load(self, folder: Path) -> None:
        """What `save` wrote."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """What it holds on the device beside the policy, as far as it can be moved while it is not in use."""


def make_reference(
    settings: RankSettings,
    engine: Any,
    load: Callable[[], PolicyModel],
    *,
    partition: dict[str, Any] | None,
    device: torch.device,
) -> Reference:
    """The reference of the policy inside `engine`. `load` gives another copy of the model that the policy started from,
    loaded under `partition` (DeepSpeed's config for ZeRO-3, else None)."""
    if settings.lora.rank:
        return FrozenAdapter(engine, engine.module)
    offload = settings.learner.offload_reference and device.type != "cpu"
    return FrozenModel(load(), engine.module, partition=partition, device=device, offload=offload)


class FrozenModel:
    """A second model beside the policy."""

    def __init__(
        self,
        model: PolicyModel,
        policy: PolicyModel,
        *,
        partition: dict[str, Any] | None,
        device: torch.device,
        offload: bool,
    ) -> None:
        """`partition`: DeepSpeed's config under which `model` was loaded for ZeRO-3."""
        self.model = model.requires_grad_(False).eval()
        self._policy, self._device = policy, device
        self._waits = torch.device("cpu") if offload and partition is None else device
        self._partitioned = partition is not None
        self._call: Any = self.model
        self._moved = False  # since it was loaded
        if partition is None:
            self.model.to(self._waits)
        else:
            import deepspeed

            self._call, *_ = deepspeed.initialize(model=self.model, config=_without_optimizer(partition, offload))

    def __call__(self, batch: PackedBatch) -> tuple[torch.Tensor, ...]:
        with self._here():
            found: tuple[torch.Tensor, ...] = self._call(batch)
            return found

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        with self._here():
            return [self._call(batch)[0] for batch in batches]

    def freeze(self) -> None:
        self._write(WeightSource(self._policy.causal_lm))
        self._moved = True

    def save(self, folder: Path, rank: int) -> None:
        if self._moved:
            _save(WeightSource(self.model.causal_lm), folder, rank)

    def load(self, folder: Path) -> None:
        if (folder / FILE).exists():
            self._write(_load(folder).items())
            self._moved = True

    def tensors(self) -> Iterable[torch.Tensor]:
        return () if self._partitioned else [*self.model.parameters(), *self.model.buffers()]

    def _write(self, source: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.model.causal_lm.named_parameters())
        for name, tensor in source:
            with writable(own[name]) as mine:
                if mine:
                    own[name].data.copy_(tensor)

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        moves = self._waits != self._device
        if moves:
            self.model.to(self._device)
        try:
            with torch.no_grad():
                yield
        finally:
            if moves:
                self.model.to(self._waits)


class FrozenAdapter:
    """The policy, with another adapter or none."""

    def __init__(self, call: Any, policy: PolicyModel) -> None:
        """`call` runs the policy: its DeepSpeed engine."""
        self._call, self._lm = call, policy.causal_lm
        self._moved = False  # no adapter stands for the model that was loaded

    def __call__(self, batch: PackedBatch) -> tuple[torch.Tensor, ...]:
        with torch.no_grad(), lora.selected(self._lm, lora.REFERENCE if self._moved else None):
            found: tuple[torch.Tensor, ...] = self._call(batch)
            return found

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        return [self(batch)[0] for batch in batches]

    def freeze(self) -> None:
        for layer in lora.layers(self._lm).values():
            for trained, kept in zip(lora.pieces(layer, lora.TRAINED), lora.pieces(layer, lora.REFERENCE), strict=True):
                with whole([trained]), writable(kept) as mine:
                    if mine:
                        kept.data.copy_(trained)
        self._moved = True

    def save(self, folder: Path, rank: int) -> None:
        if self._moved:
            _save(self._kept(), folder, rank)

    def load(self, folder: Path) -> None:
        if not (folder / FILE).exists():
            return
        stored = _load(folder)
        for name, parameter in lora.adapter_parameters(self._lm, lora.REFERENCE).items():
            with writable(parameter) as mine:
                if mine:
                    parameter.data.copy_(stored[name])
        self._moved = True

    def tensors(self) -> Iterable[torch.Tensor]:
        return ()  # a part of the policy

    def _kept(self) -> Iterable[tuple[str, torch.Tensor]]:
        for name, parameter in lora.adapter_parameters(self._lm, lora.REFERENCE).items():
            with whole([parameter]):
                yield name, parameter.detach()


def _without_optimizer(settings: dict[str, Any], offload: bool) -> dict[str, Any]:
    zero = {key: value for key, value in settings["zero_optimization"].items() if key != "offload_optimizer"}
    if offload:
        zero.setdefault("offload_param", {"device": "cpu"})
    return settings | {"zero_optimization": zero}


def _save(source: Iterable[tuple[str, torch.Tensor]], folder: Path, rank: int) -> None:
    found = {}
    for name, tensor in source:
        if rank == 0:
            found[name] = tensor.to("cpu", copy=True)
    if rank == 0:
        torch.save(found, folder / FILE)


def _load(folder: Path) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = torch.load(folder / FILE, map_location="cpu", mmap=True)
    return stored
