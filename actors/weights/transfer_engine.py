"""vLLM's side of the shared-memory transport: runs in the process that holds the model, on CPUs and on GPUs.

Invariants:
- Nothing of the model is touched before every tensor was found to be expected and every byte to be what the learner
  sent; what fails there is refused (`WeightsRefused` in the message) and the old weights stay.
- Weights are loaded through vLLM's layerwise reload: CPU kernels keep them packed, and the originals are gone. After
  it every kernel works with the new weights, the head that is tied to the embedding too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from actors.engine_errors import REFUSED
from actors.weights.publication import TensorRecord, checksum_of
from actors.weights.shared_memory import mapped


class Refused(ValueError):
    """Travels to the worker's process as text; see `actors.engine_errors.WeightsRefused`."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{REFUSED}: {why}")


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """There is no connection to make."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A whole publication: the staged files and what lies in them (`TensorRecord`'s fields, in order)."""

    version: int
    paths: list[str]
    tensors: list[list[Any]]


class SharedMemoryTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Registered by `actors.weights.plugin`."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        """Nothing yet: the model is opened for reloading when the bytes are verified."""

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        records = [TensorRecord.from_fields(fields) for fields in update_info.tensors]
        check_names(records, expected_shapes(self.model_config.model), tied=_tied(self.model_config))
        buckets = [mapped(path) for path in update_info.paths]
        check_bytes(records, buckets)
        wanted = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(tensors(records, buckets))
        missing = sorted(wanted - loaded) if loaded is not None and self.model_config.quantization is None else []
        if missing:
            raise RuntimeError(f"version {update_info.version} left {', '.join(missing[:5])} without new weights")

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)

    def shutdown(self) -> None:
        pass


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Makes an output head that shares the embedding's weight pack it anew.

    CPU kernels multiply with a packed copy. A checkpoint has no tensor for a tied head, so vLLM's reload takes it for not
    reloaded and keeps its old copy: the model would go on with the old head.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    embedded = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    }
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and id(module.weight) in embedded:
            module.quant_method.process_weights_after_loading(module)


def expected_shapes(model_dir: str) -> dict[str, tuple[int, ...]] | None:
    """{name: shape} of the checkpoint that the engine started from; None where that is no safetensors folder."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(model_dir).glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            shapes.update({name: tuple(content.get_slice(name).get_shape()) for name in content.keys()})  # noqa: SIM118
    return shapes or None


def check_names(records: list[TensorRecord], expected: Mapping[str, tuple[int, ...]] | None, *, tied: bool) -> None:
    """Refuses a publication that is not exactly the model: what is missing would silently stay old."""
    if expected is None:
        return
    optional = {"lm_head.weight"} if tied else set()
    given = {record.name: record.shape for record in records}
    for what, names in (
        ("lacks", expected.keys() - given.keys() - optional),
        ("has unknown", given.keys() - expected.keys() - optional),
    ):
        if names:
            some = ", ".join(sorted(names)[:5])
            raise Refused(f"the publication {what} {len(names)} tensors of the model folder's: {some}")
    for name in given.keys() & expected.keys():
        if given[name] != tuple(expected[name]):
            raise Refused(f"{name} has shape {list(given[name])}, the model's is {list(expected[name])}")


def check_bytes(records: list[TensorRecord], buckets: list[torch.Tensor]) -> None:
    """Refuses bytes that are not those that the learner sent. Records without a checksum are taken as they are."""
    for record in records:
        if record.offset + record.nbytes > buckets[record.bucket].numel():
            raise Refused(f"{record.name} reaches beyond the end of bucket {record.bucket}")
        if not record.checksum:
            continue
        content = buckets[record.bucket][record.offset : record.offset + record.nbytes].numpy()
        received = checksum_of(record.name, record.dtype, record.shape, content)
        if received != record.checksum:
            raise Refused(f"checksum of {record.name} is {received}, the learner's is {record.checksum}")


def tensors(records: list[TensorRecord], buckets: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as views into the buckets, in order."""
    for record in records:
        content = buckets[record.bucket][record.offset : record.offset + record.nbytes]
        yield record.name, content.view(getattr(torch, record.dtype)).view(record.shape)


def _tied(model_config: Any) -> bool:
    return bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
