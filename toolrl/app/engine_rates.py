"""Measures one engine for a plan: a decoding step with one request and with as many as fit, and how fast it reads context."""

from __future__ import annotations

import asyncio
import random
import time

from toolrl.app.model_folder import prepare_model
from toolrl.config import RunConfig
from toolrl.planning.rates import EngineRates

TOKENS = 96  # of each request
ROUNDS = 3  # the fastest counts


def measured_engine(config: RunConfig) -> EngineRates:
    """Starts the config's engine in this process, measures, stops it. Takes about half a minute on a CPU."""
    return asyncio.run(_measured(config))


async def _measured(config: RunConfig) -> EngineRates:
    from actors.engine import Engine

    limit = config.rollout.max_context_tokens
    engine = await Engine.start(
        str(prepare_model(config)),
        config.engine,
        dtype=config.model.dtype,
        max_context_tokens=limit,
        seed=config.seed,
        device=config.placement.device,
    )
    tokens, context = min(TOKENS, limit // 2), limit // 4
    rng = random.Random(0)
    names = iter(range(10**9))

    async def together(count: int, prompt: int, sampled: int) -> float:
        """Seconds until so many requests are done; each has a prompt that no cache knows."""
        prompts = [[rng.randrange(16, 256) for _ in range(max(prompt, 1))] for _ in range(count)]
        started = time.perf_counter()
        await asyncio.gather(
            *(
                engine.generate(
                    ids,
                    max_tokens=sampled,
                    temperature=1.0,
                    stop_token_ids=[],
                    seed=index,
                    request_id=f"measure-{next(names)}",
                )
                for index, ids in enumerate(prompts)
            )
        )
        return time.perf_counter() - started

    try:
        most = min(config.rollout.concurrency, config.engine.max_concurrent_requests)
        await together(most, 1, tokens)  # kernels are compiled for the sizes at hand
        one = min([await together(1, 1, tokens) for _ in range(ROUNDS)]) / tokens
        many = min([await together(most, 1, tokens) for _ in range(ROUNDS)]) / tokens
        reading = min([await together(1, context, 1) for _ in range(ROUNDS)])
    finally:
        await engine.stop()
    return EngineRates(
        step_s=one,
        step_s_each=max(0.0, many - one) / max(most - 1, 1),
        prefill_tokens_per_s=context / max(reading - one, 1e-6),
    )
