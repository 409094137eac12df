"""Processor seconds of a rollout worker's processes and of its machine: what a plan for other machines is made from."""

from __future__ import annotations

import contextlib
import time

import psutil

_ENGINE_TITLE = "VLLM"  # what vLLM calls its processes


def processor_times() -> dict[str, float]:
    """Seconds since the start: of this process (`processor_s`), of the engine's (`engine_processor_s`), and of everything on
    the machine (`machine_processor_s`)."""
    engine_s = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if child.name().startswith(_ENGINE_TITLE):
                used = child.cpu_times()
                engine_s += used.user + used.system
    machine = psutil.cpu_times()
    return {
        "processor_s": time.process_time(),
        "engine_processor_s": engine_s,
        "machine_processor_s": machine.user + machine.nice + machine.system,
    }
