"""Which way weights take from the learner to the engines: chosen by device and placement, or as the config says. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from toolrl.config import RunConfig
from toolrl.errors import Problem

Transport = Literal["shared_memory", "gloo", "nccl", "ipc"]


def transport_of(config: RunConfig, device: Literal["cpu", "cuda"]) -> Transport:
    """`auto` is `ipc` where an engine shares the learner's GPU, `nccl` between GPUs, and shared memory elsewhere: on CPUs, and
    for a bare adapter, which the others do not carry."""
    if config.weights.transport != "auto":
        return config.weights.transport
    lora = config.model.lora
    if device == "cpu" or (lora.rank and lora.publish == "adapter"):
        return "shared_memory"
    return "ipc" if config.placement.mode == "colocated" else "nccl"


def transport_problems(config: RunConfig) -> Iterator[Problem]:
    """Combinations that no device makes possible. Those of a chosen device are in `config_checks.device`, those of a bare adapter
    in `config_adapter_checks`."""
    chosen, colocated = config.weights.transport, config.placement.mode == "colocated"
    if chosen == "ipc" and not colocated:
        message = "hands memory over inside one GPU; with placement.mode=disaggregated set nccl or auto"
        yield Problem("weights.transport", message, chosen)
    if chosen == "nccl" and colocated:
        message = "cannot form a group of two processes on one GPU; with placement.mode=colocated set ipc or auto"
        yield Problem("weights.transport", message, chosen)
