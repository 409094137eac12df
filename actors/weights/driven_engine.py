"""vLLM's side of `nccl` and `ipc`: vLLM's own engine as it is, and the shared-memory engine for all that does not come over a
group: a worker's first weights, and those after a group that broke.

Invariants:
- An update that breaks off leaves no layer half loaded (`actors.weights.half_loaded`).
- An update that hangs is broken off at the deadline that the learner named: the communicator is aborted.
"""

from __future__ import annotations

import threading
from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from actors.weights.driven_payload import readable
from actors.weights.half_loaded import forget_half_loaded
from actors.weights.transfer_engine import SharedMemoryTransferEngine

OURS = "toolrl_"  # before vLLM's name of the transport


class DrivenTransferEngine(SharedMemoryTransferEngine):
    """Registered by `actors.weights.plugin`, once for each transport."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        make = WeightTransferEngineFactory._registry[self.config.backend.removeprefix(OURS)]()
        self._driven = make(*arguments, **options)
        self._begun = False

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return self._driven.parse_init_info(init_dict)

    def init_transfer_engine(self, init_info: Any) -> None:
        self._driven.shutdown()
        self._driven.init_transfer_engine(init_info)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if "step" in update_info:
            super().update_weights(update_info)
            return
        payload, within_s = readable(update_info)
        self._driven.parse_update_info(payload)  # what is no payload touches nothing
        watch = threading.Timer(within_s, self._driven.shutdown)
        watch.daemon = True
        watch.start()
        try:
            if not self._begun:
                self._begun = True
                self._driven.start_weight_update()
            self._driven.update_weights(payload)
        except BaseException:
            self._begun = False
            forget_half_loaded(self.model, self.model_config)
            raise
        finally:
            watch.cancel()

    def finish_weight_update(self) -> None:
        if self._begun:
            self._begun = False
            self._driven.finish_weight_update()

    def shutdown(self) -> None:
        self._driven.shutdown()
        super().shutdown()
