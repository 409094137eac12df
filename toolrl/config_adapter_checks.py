"""Settings of a low-rank adapter that cannot work. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from toolrl.config import RunConfig
from toolrl.errors import Problem

LARGEST_SERVED_RANK = 512  # of an adapter that vLLM (0.32) serves beside the weights


def adapter_problems(config: RunConfig) -> Iterator[Problem]:
    adapter = config.model.lora
    if adapter.publish == "adapter":
        yield from _unservable(config)
    if not adapter.rank:
        return
    if adapter.dropout:
        message = "must be 0: with dropout the same tokens have other log-probabilities in each pass"
        yield Problem("model.lora.dropout", message, adapter.dropout)
    if not adapter.target_modules:
        yield Problem("model.lora.target_modules", "name linear layers, or [all-linear]", [])
    if config.model.frozen:
        message = "has no meaning with model.lora, which trains the adapter alone; remove one of them"
        yield Problem("model.frozen", message, config.model.frozen)


def _unservable(config: RunConfig) -> Iterator[Problem]:
    """What engines cannot serve beside the weights. Layers that this model does not have are found when an engine starts."""
    adapter = config.model.lora
    if not adapter.rank:
        message = "there is no adapter to publish: set model.lora.rank above 0, or merged"
        yield Problem("model.lora.publish", message, adapter.publish)
    if adapter.rank > LARGEST_SERVED_RANK:
        message = (
            f"engines serve adapters of rank {LARGEST_SERVED_RANK} at most; lower it, or model.lora.publish=merged"
        )
        yield Problem("model.lora.rank", message, adapter.rank)
    if any(name.rsplit(".", 1)[-1] == "lm_head" for name in adapter.target_modules):
        message = "an adapter of the output head is not served; leave lm_head out, or model.lora.publish=merged"
        yield Problem("model.lora.target_modules", message, list(adapter.target_modules))
    if config.weights.transport in ("gloo", "nccl", "ipc"):
        message = "sends whole weights; set auto or shared_memory, or model.lora.publish=merged"
        yield Problem("weights.transport", message, config.weights.transport)
    if config.placement.mode == "colocated" and config.engine.sleep_level > 1:
        message = "engines would give up the weights below the adapter, which alone does not bring them back; set 1"
        yield Problem("engine.sleep_level", message, config.engine.sleep_level)
    if clash := sorted(name for name in config.engine.options if "lora" in name):
        message = "are set from model.lora; remove them"
        yield Problem("engine.options", message, clash)
