"""vLLM's entry point `vllm.general_plugins`, run in every engine process: makes our weight-transfer engine known there, and
ties the process to the one that started it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Registers the shared-memory engine by path, so that little is imported here; may be called more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from actors.engine_setup import BACKENDS

    name = BACKENDS["shared_memory"]
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            name, "actors.weights.transfer_engine", "SharedMemoryTransferEngine"
        )
    _end_with_parent()


def _end_with_parent() -> None:
    """An idle engine process does not notice that its worker was killed: the kernel then ends it.

    Only in processes that multiprocessing spawned: the worker itself loads plugins too, and belongs to Ray. The signal comes when
    the spawning *thread* ends, so an engine is started in the event loop's thread, which lasts as long as the worker.
    """
    if sys.platform != "linux" or (parent := multiprocessing.parent_process()) is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died before the line above
        os._exit(1)
