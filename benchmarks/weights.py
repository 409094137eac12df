"""Weights from publish to applied on a real engine, against one copy of the same bytes in memory; and the pause it costs.

Everything is on the way that a run takes: Ray's object store, shared memory, vLLM's process, checksums on both sides, while the
engine generates. Two sizes: the tiny model shows what an update costs at least, the larger one what a byte costs.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.engine import Engine
from actors.weights import WeightReceiver, publish
from toolrl.config import EngineConfig

SIZES = {"tiny": (128, 2, 20), "larger": (768, 8, 6)}  # width, layers, updates
REQUESTS = 8
MS = 1e3


def run() -> dict[str, Any]:
    """`rows`: milliseconds, medians over updates except the p99 of the pause; the copy is into memory that was touched."""
    import ray

    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    try:
        rows = [asyncio.run(_measure(name, *size)) for name, size in SIZES.items()]
    finally:
        ray.shutdown()
    return {"load before": before, "load after": os.getloadavg()[0], "rows": rows}


async def _measure(name: str, width: int, layers: int, updates: int) -> dict[str, Any]:
    model = _model(width, layers)
    settings = EngineConfig(kv_cache_gib=0.25, max_concurrent_requests=REQUESTS)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = await Engine.start(
            Path(folder), settings, dtype="float32", max_context_tokens=512, seed=0, device="cpu"
        )
        try:
            generating = asyncio.create_task(_generate(engine))
            reports = [await _update(engine, model, version) for version in range(1, updates + 2)][1:]
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)
        finally:
            await engine.stop()
    middle = {key: statistics.median(report[key] for report in reports) * MS for key in reports[0]}
    pauses = sorted(report["paused_s"] for report in reports)
    return {
        "model": f"{name}, {sum(p.nbytes for p in model.parameters()) / 2**20:.1f} MiB",
        "copy": middle["copy_s"],
        "publish": middle["publish_s"],
        "fetch": middle["fetch_s"],
        "stage": middle["stage_s"],
        "pause": middle["paused_s"],
        "of it load": middle["load_s"],
        "pause p99": pauses[int(0.99 * len(pauses))] * MS,
        "total": middle["total_s"],
        "times the copy": statistics.median(report["total_s"] / report["copy_s"] for report in reports),
    }


async def _update(engine: Engine, model: Qwen3ForCausalLM, version: int) -> dict[str, float]:
    """Seconds of one update by part, and of the copy made just before."""
    copy_s = _copy_s(model)
    started = time.perf_counter()
    publication = await asyncio.to_thread(publish, model.named_parameters(), version)
    published = time.perf_counter()
    report = await WeightReceiver(engine).apply(publication)
    done = time.perf_counter()
    if engine.version != version:
        raise RuntimeError(f"the engine has version {engine.version} after version {version} was published")
    await asyncio.sleep(0.05)  # some tokens
    parts = {key: float(report[key]) for key in ("fetch_s", "stage_s", "paused_s", "load_s")}
    return {"copy_s": copy_s, "publish_s": published - started, "total_s": done - started, **parts}


def _copy_s(model: Qwen3ForCausalLM) -> float:
    """Of all weights, tensor by tensor, into one buffer that has been written to before."""
    parts = [parameter.detach().reshape(-1).view(torch.uint8).numpy() for parameter in model.parameters()]
    buffer = np.zeros(sum(part.nbytes for part in parts), dtype=np.uint8)
    buffer[:] = 1
    started = time.perf_counter()
    offset = 0
    for part in parts:
        buffer[offset : offset + part.nbytes] = part
        offset += part.nbytes
    return time.perf_counter() - started


async def _generate(engine: Engine) -> None:
    """Keeps the engine busy until it is cancelled."""

    async def stream(index: int) -> None:
        number = 0
        while True:
            number += 1
            await engine.generate(
                [1 + index] * 32, max_tokens=400, temperature=1.0, stop_token_ids=[], request_id=f"{index}-{number}"
            )

    await asyncio.gather(*map(stream, range(REQUESTS)))


def _model(width: int, layers: int) -> Qwen3ForCausalLM:
    heads = width // 32
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).eval()


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
