"""The small engine of `toolrl bench planted`: what it says it sampled is what the model says, whoever shares the batch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from actors.engine import Generated
from benchmarks.collapses.sampler import TorchEngine
from toolrl.app.tiny_model import tiny_config

PROMPTS = [[5, 6, 7], [9] * 12, [40, 41], [5, 6, 7]]


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    torch.manual_seed(0)
    return TorchEngine(Qwen3ForCausalLM(tiny_config(2, 0)), version=3)


def asked(
    engine: TorchEngine, prompts: list[list[int]], stop: list[int] | None = None, **changed: Any
) -> list[Generated]:
    """Each prompt with its place as its seed."""

    async def together() -> list[Generated]:
        how: dict[str, Any] = {"max_tokens": 10, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "request_id": ""}
        how |= changed
        each = [
            engine.generate(prompt, stop_token_ids=stop or [], seed=seed, **how) for seed, prompt in enumerate(prompts)
        ]
        return list(await asyncio.gather(*each))

    return asyncio.run(together())


def test_log_probabilities_are_those_of_a_whole_pass(engine: TorchEngine) -> None:
    for prompt, found in zip(PROMPTS, asked(engine, PROMPTS), strict=True):
        ids = torch.tensor([prompt + found.token_ids])
        with torch.no_grad():
            logp = torch.log_softmax(engine.model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 0.7, -1)
        expected = logp[torch.arange(len(found.token_ids)), torch.tensor(found.token_ids)]
        assert torch.allclose(torch.tensor(found.logprobs), expected, atol=1e-5)
        assert (found.finish_reason, set(found.weight_versions)) == ("length", {3})


def test_a_seed_samples_the_same_alone_and_among_others(engine: TorchEngine) -> None:
    assert asked(engine, PROMPTS)[0].token_ids == asked(engine, PROMPTS[:1])[0].token_ids
    first, *_, last = asked(engine, PROMPTS)
    assert first.token_ids != last.token_ids  # the same prompt under another seed


def test_a_stop_token_ends_the_turn_and_is_part_of_it(engine: TorchEngine) -> None:
    free = asked(engine, PROMPTS)[1].token_ids
    stopped = asked(engine, PROMPTS, stop=[free[4]])[1]
    assert stopped.token_ids == free[: free.index(free[4]) + 1]
    assert stopped.finish_reason == "stop"


def test_tokens_are_drawn_with_their_probabilities(engine: TorchEngine) -> None:
    with torch.no_grad():
        expected = torch.softmax(engine.model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.1, -1)
    drawn = [found.token_ids[0] for found in asked(engine, [[5, 6, 7]] * 2000, max_tokens=1, temperature=0.1)]
    shares = torch.bincount(torch.tensor(drawn), minlength=512) / 2000
    assert expected.max() > 0.1  # far from uniform
    assert (shares - expected).abs().max() < 4 * (0.25 / 2000) ** 0.5
