"""A Qwen3 of two layers and width 64 with random weights, engines on it, and what transformers says about the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from actors.engine import Engine
from actors.weights import Publication, Publisher
from toolrl.config import EngineConfig

VOCABULARY = 256
CONTEXT = 512
TOLERANCE = 1e-5

publishers: list[Publisher] = []


def model(seed: int, tied: bool = True) -> Qwen3ForCausalLM:
    """Weights larger than at a usual start, so that the distributions are far from uniform and versions far apart."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            initializer_range=0.1,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
            dtype="float32",
        )
        return Qwen3ForCausalLM(config).eval()


def folder(root: Path, seed: int) -> Path:
    place = root / f"model-{seed}"
    model(seed).save_pretrained(place)
    return place


async def engine(model_dir: Path, name: str, **options: object) -> Engine:
    config = EngineConfig(kv_cache_gib=0.25, max_concurrent_requests=64)
    return await Engine.start(
        model_dir, config, dtype="float32", max_context_tokens=CONTEXT, seed=0, name=name, device="cpu", **options
    )  # type: ignore[arg-type]


def publication(source: PreTrainedModel, version: int, bucket_bytes: int = 1 << 16) -> Publication:
    """In this process's memory, in several buckets, for as long as the process lives."""
    publishers.append(Publisher(bucket_bytes=bucket_bytes))
    return publishers[-1].publish(source.named_parameters(), version)


@torch.no_grad()
def logprobs(
    policy: PreTrainedModel,
    prompt: Sequence[int],
    tokens: Sequence[int],
    temperature: float,
    *,
    before: tuple[PreTrainedModel, int] | None = None,
) -> list[float]:
    """The trainer's log-probabilities of `tokens` after `prompt`.

    `before=(old, n)`: as when weights change after n tokens and the keys and values computed so far stay: `old` has read
    the prompt and the first n - 1 tokens, `policy` reads the rest on top of that; entries from n on are `policy`'s.
    """
    ids = torch.tensor([[*prompt, *tokens]])
    start = len(prompt)
    if before is None:
        logits = policy(ids).logits[0]
    else:
        old, n = before
        cut = start + n - 1
        cache = DynamicCache(config=old.config)
        first = old(ids[:, :cut], past_key_values=cache, use_cache=True).logits[0]
        rest = policy(ids[:, cut:], past_key_values=cache, use_cache=True).logits[0]
        logits = torch.cat([first, rest])
    chosen = torch.log_softmax(logits[start - 1 : -1].float() / temperature, dim=-1)
    return chosen.gather(1, ids[0, start:, None])[:, 0].tolist()


def gap(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest difference."""
    assert len(a) == len(b)
    return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)
