"""The one adapter that an engine serves over its weights: verified in the worker, laid out as vLLM reads adapters, put in
place of the one before in the pause.

Invariants:
- What vLLM is given are the learner's bytes: every tensor has the learner's checksum, A and B come together and fit a weight of
  the model folder, and each version has the tensors of the one before. What fails is refused before the pause.
- All versions have one name and number in vLLM, and every request names it: those that run go on under the next version, and
  the version that each token carries says under which it was made. The version salts the prefix cache, as with whole weights.
- The folder exists only while vLLM reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from actors.engine_errors import EngineStartFailed, UpdateFailed, WeightsRefused
from actors.weights.publication import Publication, TensorRecord
from actors.weights.shared_memory import mapped
from actors.weights.verification import Refused, expected_shapes, verified_tensors
from toolrl.config import LoraConfig
from toolrl.private_folder import private_folder

if TYPE_CHECKING:
    from actors.engine import Engine, UpdateTimes

Shapes = Mapping[str, tuple[int, ...]]
PREFIX = "base_model.model."  # of peft's names
_NO_LINEAR = ("embed", "lm_head", "wte", "wpe")  # weights with two axes that peft's all-linear leaves out


class ServedAdapter:
    """Belongs to one engine."""

    def __init__(self, engine: Engine, model: Shapes | None) -> None:
        from vllm.lora.request import LoRARequest

        self._engine = engine
        self._model = model
        self._names: set[str] | None = None  # of the tensors of the last version
        self.request = LoRARequest("policy", 1, lora_path="served-in-place")  # vLLM reads a path only when told to load

    @classmethod
    async def begin(cls, engine: Engine, model_dir: str, lora: LoraConfig) -> ServedAdapter:
        """One that changes nothing, so that a request that begins before the first update can go on under a later one.

        Raises:
            EngineStartFailed: vLLM cannot serve adapters of this kind over this model.
        """
        model = await asyncio.to_thread(expected_shapes, model_dir)
        adapter = cls(engine, model)
        try:
            await adapter._load(engine.version, *untrained(model, lora))
        except UpdateFailed as error:
            raise EngineStartFailed(
                f"engine {engine.name} on {model_dir} cannot serve an adapter of this kind: {error}; set "
                "model.lora.target_modules to layers that vLLM serves, or model.lora.publish=merged"
            ) from error
        return adapter

    async def update(self, publication: Publication, paths: Sequence[str]) -> UpdateTimes:
        """Brings the engine to the adapter that lies at `paths`; running requests stay where they are.

        Raises:
            WeightsRefused: nothing was changed. UpdateFailed: the engine has no valid weights now. EngineDied.
        """
        started = time.monotonic()
        try:
            tensors = await asyncio.to_thread(received, publication, paths, self._model, self._names)
        except Refused as error:
            raise WeightsRefused(f"engine {self._engine.name} keeps version {self._engine.version}: {error}") from error
        spent = await self._load(publication.version, tensors, publication.adapter or {})
        self._names = set(tensors)
        return replace(spent, prepare_s=time.monotonic() - started - spent.paused_s)

    async def _load(
        self, version: int, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
    ) -> UpdateTimes:
        from msgspec import structs

        with laid_out(tensors, settings) as folder:
            request = structs.replace(self.request, lora_path=str(folder), load_inplace=True)
            return await self._engine.load_adapter(version, request)


@contextlib.contextmanager
def laid_out(tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> Iterator[Path]:
    """A folder that vLLM's `LoRARequest` takes."""
    with private_folder() as folder:
        save_file(dict(tensors), folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(dict(settings)), encoding="utf-8")
        yield folder


def received(
    publication: Publication, paths: Sequence[str], model: Shapes | None, before: Set[str] | None = None
) -> dict[str, torch.Tensor]:
    """The publication's tensors, copied from the buckets at `paths` of this host's memory. `before`: those of the last one.

    Raises:
        Refused: they are not what the learner sent, or no adapter of the model with these weights.
    """
    if publication.adapter is None:
        raise Refused("these are whole weights, and the engine serves an adapter beside those that it has")
    check_adapter(publication.tensors, model, int(publication.adapter["r"]))
    names = {record.name for record in publication.tensors}
    if before is not None and names != before:
        raise Refused(f"the adapter has not the tensors that it had before: {', '.join(sorted(names ^ before)[:5])}")
    buckets = [torch.from_numpy(mapped(path, size).copy()) for path, size in zip(paths, publication.sizes, strict=True)]
    return dict(verified_tensors(list(publication.tensors), buckets))


def check_adapter(records: Sequence[TensorRecord], model: Shapes | None, rank: int) -> None:
    """A [rank, in] and B [out, rank] for each of some weights [out, in]; `model` None: whatever they are.

    Raises:
        Refused: names the tensor.
    """
    given = {record.name: record.shape for record in records}
    for name, shape in given.items():
        module, piece, _ = name.removeprefix(PREFIX).rpartition(".lora_")
        if not piece or name.removeprefix(f"{PREFIX}{module}") not in (".lora_A.weight", ".lora_B.weight"):
            raise Refused(f"{name} is no tensor of an adapter")
        if not {f"{PREFIX}{module}.lora_{each}.weight" for each in "AB"} <= given.keys():
            raise Refused(f"the adapter of {module} has one of A and B only")
        if model is None:
            continue
        weight = model.get(f"{module}.weight")
        if weight is None or len(weight) != 2:
            raise Refused(f"{name} adapts a weight that the model folder does not have")
        wanted = (rank, weight[1]) if ".lora_A." in name else (weight[0], rank)
        if shape != wanted:
            raise Refused(f"{name} has shape {list(shape)}, it must be {list(wanted)}")


def untrained(model: Shapes | None, lora: LoraConfig) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An adapter that changes nothing (A and B are 0) and its settings, for an engine that has not been given one yet.

    It adapts what a trained one would, so that vLLM refuses at the start what it could not serve later.
    """
    targets = list(lora.target_modules)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in (model or {}).items():
        module = name.removesuffix(".weight")
        if module == name or len(shape) != 2:
            continue
        if targets == ["all-linear"]:
            adapted = not any(word in module for word in _NO_LINEAR)
        else:
            adapted = any(module == target or module.endswith(f".{target}") for target in targets)
        if adapted:
            tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.zeros(lora.rank, shape[1])
            tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.zeros(shape[0], lora.rank)
    modules = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors})
    return tensors, {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "bias": "none",
        "target_modules": modules,
    }
