"""What an update that broke off leaves in vLLM's layerwise reload, and how it is forgotten."""

from __future__ import annotations

from typing import Any

import torch


def forget_half_loaded(model: torch.nn.Module, model_config: Any) -> None:
    """Gives layers that wait for the rest of their tensors their last weights back.

    vLLM (0.32) counts a layer's tensors across updates: with what came before, the next update's would be taken for complete when
    they are not, and the layer would silently have some old ones.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    half = [info for info in map(get_layerwise_info, model.modules()) if info.can_load()]
    for info in half:
        info.loaded_weights.clear()
        info.load_numel = 0
    if half:
        finalize_layerwise_reload(model, model_config)
