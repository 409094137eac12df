"""vLLM's entry point `vllm.general_plugins`, run in every engine process: makes our weight-transfer engines known there, ties
the process to the one that started it, and makes it keep memory that it will need again.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

ENGINES = {
    "shared_memory": ("actors.weights.transfer_engine", "SharedMemoryTransferEngine"),
    "gloo": ("actors.weights.gloo_engine", "GlooTransferEngine"),
    "nccl": ("actors.weights.driven_engine", "DrivenTransferEngine"),
    "ipc": ("actors.weights.driven_engine", "DrivenTransferEngine"),
}
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def register() -> None:
    """Registers our engines by path, so that little is imported here; may be called more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from actors.engine_setup import BACKENDS

    for transport, name in BACKENDS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, *ENGINES[transport])
    if sys.platform == "linux" and (parent := multiprocessing.parent_process()) is not None:
        _end_with(parent.pid)
        _keep_freed_memory()


def _end_with(parent: int | None) -> None:
    """An idle engine process does not notice that its worker was killed: the kernel then ends it.

    Only in processes that multiprocessing spawned: the worker itself loads plugins too, and belongs to Ray. The signal comes when
    the spawning *thread* ends, so an engine is started in the event loop's thread, which lasts as long as the worker.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _keep_freed_memory() -> None:
    """Every weight update packs all weights into new memory and frees as much. glibc would give that back to the kernel and
    take it again a page at a time, which costs more than the packing. Where another allocator is in use this does nothing.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_ARENA_MAX, 1)  # what one thread frees, another takes


def give_back_freed_memory() -> None:
    """To the kernel, once."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
