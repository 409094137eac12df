"""vLLM's entry point `vllm.general_plugins`: makes our weight-transfer engine known in every engine process."""

from __future__ import annotations


def register() -> None:
    """Registers the shared-memory engine by path, so that little is imported here; may be called more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from actors.engine_setup import BACKENDS

    name = BACKENDS["shared_memory"]
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            name, "actors.weights.transfer_engine", "SharedMemoryTransferEngine"
        )
