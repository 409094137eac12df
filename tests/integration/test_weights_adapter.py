"""A real engine serves what a learner with an adapter, or with frozen weights, holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.requirements import need

need("vllm", "accelerate", "peft")

from actors.weights import WeightReceiver
from learner import lora
from learner.policy import choose_trained
from learner.weight_source import WeightSource, checksum
from tests.integration import tiny_engines as tiny
from toolrl.config import LoraConfig

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = [(7 * k) % 250 + 2 for k in range(150)]
TEMPERATURE = 0.6


class Published:
    """A model's weights as the learner publishes them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.source = WeightSource(model)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.source)


def adapted() -> Any:
    policy = tiny.model(0)
    choose_trained(policy, adapter=LoraConfig(rank=4, alpha=8.0), frozen=[], seed=0)
    return policy


def frozen() -> Any:
    policy = tiny.model(0)
    choose_trained(policy, adapter=LoraConfig(), frozen=["model.embed_tokens.*"], seed=0)
    return policy


def trained(policy: Any, seed: int) -> Any:
    """As after some steps: everything that is trained has moved."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return policy


async def test_the_engine_s_log_probabilities_are_those_of_the_learner_with_its_adapter(tmp_path):
    engine = await tiny.engine(tiny.folder(tmp_path, 0), "engine-a")
    receiver = WeightReceiver(engine)
    try:
        for version, policy in ((1, trained(adapted(), 1)), (2, trained(adapted(), 2)), (3, trained(frozen(), 3))):
            publication = tiny.publication(Published(policy), version)  # type: ignore[arg-type]
            report = await receiver.apply(publication)  # the engine's process finds every tensor to have its checksum
            assert (report["version"], report["checksum"]) == (version, publication.checksum)
            one = await engine.generate(
                PROMPT, max_tokens=60, temperature=TEMPERATURE, stop_token_ids=[], seed=5, request_id=str(version)
            )
            assert one.weight_versions == [version] * 60
            # With the adapter beside the weights, not merged: what the learner computes.
            learners = tiny.logprobs(policy, PROMPT, one.token_ids, TEMPERATURE)
            assert tiny.gap(one.logprobs, learners) < tiny.TOLERANCE
            assert tiny.gap(one.logprobs, tiny.logprobs(tiny.model(0), PROMPT, one.token_ids, TEMPERATURE)) > 0.1
    finally:
        await engine.stop()


def test_frozen_weights_are_published_as_they_were_loaded() -> None:
    for policy, kept in ((trained(adapted(), 1), ("embed_tokens", "norm")), (trained(frozen(), 3), ("embed_tokens",))):
        loaded = {name: checksum(tensor) for name, tensor in tiny.model(0).named_parameters()}
        held = WeightSource(policy).checksums()
        assert held.keys() == loaded.keys()
        assert {name for name in held if held[name] == loaded[name]} == {
            name for name in loaded if any(part in name for part in kept)
        }
        assert not any(lora.adapter_of(name) for name in held)
