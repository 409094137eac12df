"""vLLM's side of the shared-memory transport: runs in the process that holds the model, on CPUs and on GPUs.

An update has two steps: `prepare`, while the model generates, and `apply`, in the pause. When a process of the engine could
not prepare, all are told to `refuse`.

Invariants:
- `prepare` runs in a thread of its own and touches nothing of the model: every tensor is found to be expected, every byte to
  be what the learner sent, and on CPUs the next weights are made ready (`actors.weights.twin`). What fails there is
  refused (`WeightsRefused` in the message) and the old weights stay.
- After `apply` every kernel works with the new weights, the head that is tied to the embedding too.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from actors.engine_answers import BAD, GOOD, answer
from actors.weights.half_loaded import forget_half_loaded
from actors.weights.publication import TensorRecord, bucket_sizes
from actors.weights.shared_memory import identity, mapped
from actors.weights.twin import Twin, has_twin, pack_heads
from actors.weights.verification import Refused, check_names, expected_shapes, verified_tensors

MAPPED_SETS = 3  # a writer's two slots, and one to spare


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """There is no connection to make."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`prepare` brings the publication: its buckets and what lies in them (`TensorRecord`'s fields, in order)."""

    step: Literal["prepare", "apply", "refuse"]
    version: int
    paths: list[str] = field(default_factory=list)
    tensors: list[list[Any]] = field(default_factory=list)
    answer: list[Any] = field(default_factory=list)  # where to say that the step is done (`actors.engine_answers`)
    why: str = ""  # of `refuse`
    # Of an engine over several nodes: paths and where to say so on the second, the third node, …; the first has those above.
    elsewhere_paths: list[list[str]] = field(default_factory=list)
    elsewhere_answers: list[list[Any]] = field(default_factory=list)


class SharedMemoryTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Registered by `actors.weights.plugin`."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._ready: Future[None] | None = None
        self._tensors: dict[str, torch.Tensor] = {}  # views into the writer's memory
        self._mappings: collections.OrderedDict[tuple[Any, ...], list[torch.Tensor]] = collections.OrderedDict()
        self._twin: Twin | None = None
        self._expected = expected_shapes(self.model_config.model)

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        """Nothing yet: the model is not touched before the bytes are verified."""

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        if update_info.step == "prepare":
            update_info = self._of_this_node(update_info)
            self._ready = self._thread.submit(self._prepare, update_info)
        elif self._ready is None:
            raise Refused("there is nothing to apply")
        else:
            ready, self._ready = self._ready, None
            ready.result()
            if update_info.step == "refuse":
                raise Refused(
                    update_info.why
                    or f"another process of the engine did not take version {update_info.version}; its output says why"
                )
            self._apply(update_info.version)

    def _of_this_node(self, info: SharedMemoryUpdateInfo) -> SharedMemoryUpdateInfo:
        further = self.vllm_config.parallel_config.node_rank - 1
        if further < 0:
            return info
        paths = info.elsewhere_paths[further] if info.elsewhere_paths else info.paths
        return replace(info, paths=paths, answer=info.elsewhere_answers[further] if info.elsewhere_answers else [])

    def _prepare(self, info: SharedMemoryUpdateInfo) -> None:
        verdict = BAD
        try:
            records = [TensorRecord.from_fields(fields) for fields in info.tensors]
            check_names(records, self._expected, tied=_tied(self.model_config))
            arriving = self._arriving(info, records)
            twin, self._twin = self._twin, None  # one that fails in the middle is not used again
            if twin is None and has_twin(self.model, self.vllm_config):
                twin = Twin(self.model)
            if twin is None:
                self._tensors = dict(arriving)
            elif isinstance(arriving, dict):
                self._check_loaded(twin.load(arriving, self.model_config), info.version)
            else:
                self._check_loaded(twin.stream(arriving, self.model_config), info.version)
            self._twin, verdict = twin, GOOD
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"version {info.version} could not be prepared: {type(error).__name__}: {error}") from error
        finally:
            if info.answer:
                answer(info.answer, verdict)

    def _arriving(
        self, info: SharedMemoryUpdateInfo, records: list[TensorRecord]
    ) -> dict[str, torch.Tensor] | Iterator[tuple[str, torch.Tensor]]:
        """The tensors, each verified before it is given: all at once, or one after the other as they come."""
        return dict(verified_tensors(records, self._mapped(info.paths, bucket_sizes(records))))

    def _apply(self, version: int) -> None:
        if self._twin is not None:
            self._twin.exchange()
            return
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        try:
            initialize_layerwise_reload(self.model)
            self._check_loaded(self.model.load_weights(self._tensors.items()), version)
        except BaseException:
            forget_half_loaded(self.model, self.model_config)
            raise
        finalize_layerwise_reload(self.model, self.model_config)
        pack_heads(self.model)
        self._tensors = {}

    def _check_loaded(self, loaded: set[str] | None, version: int) -> None:
        if loaded is None or self.model_config.quantization is not None:
            return
        if missing := sorted({name for name, _ in self.model.named_parameters()} - loaded):
            raise RuntimeError(f"version {version} left {', '.join(missing[:5])} without new weights")

    def _mapped(self, paths: Sequence[str], sizes: Sequence[int]) -> list[torch.Tensor]:
        """[bytes] uint8 each. Mapping costs more than copying, so the mappings of the writer's slots are kept."""
        if len(paths) < len(sizes):
            raise Refused(f"the publication has {len(paths)} buckets and tensors in {len(sizes)}")
        key = tuple((path, identity(path), size) for path, size in zip(paths, sizes, strict=False))
        buckets = self._mappings.pop(key, None)
        if buckets is None:
            with warnings.catch_warnings():  # torch says that it cannot forbid writing; the kernel does
                warnings.filterwarnings("ignore", message=".*not writable")
                buckets = [torch.from_numpy(mapped(path, size)) for path, _, size in key]
        self._mappings[key] = buckets
        while len(self._mappings) > MAPPED_SETS:
            self._mappings.popitem(last=False)
        return buckets

    def finish_weight_update(self) -> None:
        """Nothing left: `apply` is whole."""

    def shutdown(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _tied(model_config: Any) -> bool:
    return bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
