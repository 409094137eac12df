"""On CPUs: the next weights are made ready in a twin of the model while the model generates, and exchanged in the pause.

CPU kernels multiply with packed copies of the weights, and packing takes several times as long as copying. The twin has
modules of its own of the same classes. vLLM's loading and its layerwise reload run on it once as they do on a model; from
then on its layers pack straight from where the publication lies (`actors.weights.routes`). In the exchange, parameters swap
their storage and modules their packed kernels: no byte is copied. Engines hold the weights twice for it.

Only unquantised linear, embedding and normalisation layers are known to keep all that depends on weights in these two places;
`has_twin` says whether a model is made of them. Others are reloaded in the pause.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from actors.weights.plugin import give_back_freed_memory
from actors.weights.routes import NoRoute, Routes, rows_of, together

PACKED = "cpu_linear"  # where vLLM's CPU layers keep the kernel over their packed weight


def has_twin(model: torch.nn.Module, vllm_config: Any) -> bool:
    """Whether the next weights of `model` can be made ready beside it."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or vllm_config.model_config.quantization or vllm_config.lora_config:
        return False
    for module in model.modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        method = getattr(module, "quant_method", None)
        if own and any(buffer is not None for buffer in module._buffers.values()):
            return False
        if own and method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return False
        if hasattr(module, "process_weights_after_loading") and type(module) is not Attention:
            return False  # it keeps something of its own, as latent attention does
    return True


class Twin:
    """`load` in a thread, at any time; then `exchange` while the model is not running."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._original = model
        self.model: torch.nn.Module = _twin_of(model, {})
        self.routes: Routes | None = None  # to be learned
        self._modules = dict(self.model.named_modules())

    def load(self, tensors: Mapping[str, torch.Tensor], model_config: Any) -> set[str] | None:
        """Loads and packs. Returns the names of the parameters that vLLM loaded, None when it was not asked.

        When it fails the twin is of no use any more.
        """
        with torch.no_grad():
            if self.routes is not None and self.routes.fit(tensors):
                self._follow(self.routes, tensors)
                return None
            return self._load(tensors, model_config)

    def stream(self, tensors: Iterator[tuple[str, torch.Tensor]], model_config: Any) -> set[str] | None:
        """As `load`, of tensors that come one after the other and are not there together."""
        with torch.no_grad():
            return self._by_vllm(tensors, model_config)

    def _load(self, tensors: Mapping[str, torch.Tensor], model_config: Any) -> set[str] | None:
        lesson = Lesson(self._modules, tensors)
        loaded = self._by_vllm(tensors.items(), model_config, lesson)
        self.routes = lesson.routes()
        if self.routes is not None:  # the copies that vLLM made are not made again
            give_back_freed_memory()
        return loaded

    def _by_vllm(
        self, tensors: Iterable[tuple[str, torch.Tensor]], model_config: Any, lesson: Lesson | None = None
    ) -> set[str] | None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        with lesson or contextlib.nullcontext():
            loaded: set[str] | None = self.model.load_weights(tensors)
        finalize_layerwise_reload(self.model, model_config)
        pack_heads(self.model)
        return loaded

    def _follow(self, routes: Routes, tensors: Mapping[str, torch.Tensor]) -> None:
        """What `_load` comes to, without a copy of the packed weights."""
        for path, names in routes.packed.items():
            layer = self._modules[path]
            empty = layer._parameters["weight"]
            layer._parameters["weight"] = torch.nn.Parameter(together([tensors[name] for name in names]), False)
            layer.quant_method.process_weights_after_loading(layer)
            if layer._parameters["weight"].numel():
                raise RuntimeError(f"{path} did not pack its weight")
            layer._parameters["weight"] = empty
        for name in routes.copied:
            self.model.get_parameter(name).data[: len(tensors[name])].copy_(tensors[name])
        pack_heads(self.model)

    def exchange(self) -> None:
        """The model has what was loaded, the twin what the model had."""
        exchanged: set[int] = set()  # a tied weight is one parameter of two modules
        for ours, other in zip(self._original.modules(), self.model.modules(), strict=True):
            for name, parameter in ours._parameters.items():
                if parameter is not None and id(parameter) not in exchanged:
                    exchanged.add(id(parameter))
                    twin = other._parameters[name]
                    parameter.data, twin.data = twin.data, parameter.data
            if PACKED in ours.__dict__:
                ours.__dict__[PACKED], other.__dict__[PACKED] = other.__dict__[PACKED], ours.__dict__[PACKED]


class Lesson:
    """Around a load by vLLM: looks at every linear layer's weight in the moment in which it is packed."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], tensors: Mapping[str, torch.Tensor]) -> None:
        self._modules = modules
        self._tensors = tensors
        self._names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
        self._methods: dict[str, Any] = {}
        self._packed: dict[str, list[str]] = {}

    def __enter__(self) -> Lesson:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        see = self._see

        class Witness(UnquantizedLinearMethod):  # type: ignore[misc]
            def __init__(self, path: str) -> None:
                self.path = path

            def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
                see(self.path, layer)
                super().process_weights_after_loading(layer)

        for path, module in self._modules.items():
            if type(method := getattr(module, "quant_method", None)) is UnquantizedLinearMethod:
                self._methods[path], module.quant_method = method, Witness(path)
        return self

    def __exit__(self, *_: object) -> None:
        for path, method in self._methods.items():
            self._modules[path].quant_method = method

    def _see(self, path: str, layer: torch.nn.Module) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        given = [bound.arguments.get("loaded_weight") for name, bound in get_layerwise_info(layer).loaded_weights]
        names = [self._names.get(each.data_ptr(), "") for each in given if each is not None]
        with contextlib.suppress(NoRoute):
            if "" not in names:
                self._packed[path] = rows_of(layer.weight, {name: self._tensors[name] for name in names})

    def routes(self) -> Routes | None:
        """None where not every tensor's way was seen."""
        if self._packed.keys() != self._methods.keys():
            return None
        whole = self._modules[""]
        taken = {name for names in self._packed.values() for name in names}
        copied = []
        for name, parameter in whole.named_parameters():
            if not parameter.numel():
                continue
            tensor = self._tensors.get(name)
            if tensor is None or not torch.equal(parameter[: len(tensor)], tensor):
                return None
            copied.append(name)
        if taken.isdisjoint(copied) and taken.union(copied) == self._tensors.keys():
            return Routes(
                self._packed, copied, {name: (each.shape, each.dtype) for name, each in self._tensors.items()}
            )
        return None


def pack_heads(model: torch.nn.Module) -> None:
    """Makes what serves as output head pack its weight.

    A checkpoint has no tensor for a head that shares the embedding's weight, so vLLM's reload takes it for not reloaded and keeps
    its old packed copy: the model would go on with the old head. Some models use the embedding itself as head.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    packing = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and type(module.quant_method) is UnquantizedEmbeddingMethod
    ]
    heads = [module for module in packing if isinstance(module, ParallelLMHead)]
    for module in heads or packing:
        module.quant_method.process_weights_after_loading(module)


def _twin_of(module: torch.nn.Module, made: dict[int, Any]) -> torch.nn.Module:
    """A module of the same class and attributes, with parameters and children of its own. `made` is by the original's id."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

    if id(module) in made:
        twin: torch.nn.Module = made[id(module)]
        return twin
    twin = made[id(module)] = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_parameters"] = {name: _twin_parameter(each, made) for name, each in module._parameters.items()}
    twin.__dict__["_buffers"] = dict(module._buffers)
    twin.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    twin.__dict__["_modules"] = {
        name: child if child is None else _twin_of(child, made) for name, child in module._modules.items()
    }
    # What vLLM's reload begins with. It puts its loaders into these tensors, so they must not be the model's own.
    known = get_layerwise_info(module)
    parameters, buffers = (
        {name: to_meta_tensor(each) for name, each in kind.items()} for kind in known.restore_metadata
    )
    LAYERWISE_INFO[twin] = LayerReloadingInfo((parameters, buffers), known.restore_device)
    return twin


def _twin_parameter(parameter: torch.nn.Parameter | None, made: dict[int, Any]) -> Any:
    if parameter is None:
        return None
    if id(parameter) not in made:
        twin = torch.empty_like(parameter.data)
        twin.__class__ = parameter.__class__
        twin.__dict__ = parameter.__dict__.copy()
        made[id(parameter)] = twin
    return made[id(parameter)]
