"""Weights from publish to applied on a real engine, against one copy of the same bytes in memory; and the pause it costs.

Everything is on the way that a run takes: shared memory, vLLM's process, checksums on both sides, while the engine generates.
Two sizes: the tiny model shows what an update costs at least, the larger one what a byte costs.

A CPU engine multiplies with packed copies of its weights. "vllm packs" is the part of an update that vLLM's own code takes
for that, measured alone in this process, on the same matrices: no way to bring weights to such an engine takes less.

The rows "over gloo" are the same update over a group of this process and the engine's: through TCP, and with vLLM's loading of
every tensor in the place of the packing straight from memory.

Copy, packing and update follow each other in every round, and ratios are medians over the rounds. With other work on the
machine the clock measures the neighbours too: the columns "by processor" are the same ratios in processor seconds of this
process and the engine's, over updates of an engine that has no requests.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.engine import Engine
from actors.weights import Publication, Publisher, WeightReceiver
from actors.weights.driven_update import DrivenUpdate
from actors.weights.engine_client import EngineClient
from actors.weights.gloo_sender import GlooSender, GlooSettings
from actors.weights.publisher import BUCKET_BYTES
from learner.weight_source import WeightSource
from toolrl.config import EngineConfig
from toolrl.weight_transport import Transport

SIZES = {"tiny": (128, 2, 20), "larger": (768, 8, 12)}  # width, layers, updates
TRANSPORTS: tuple[Transport, ...] = ("shared_memory", "gloo")
REQUESTS = 8
MS = 1e3


def run() -> dict[str, Any]:
    """`rows`: milliseconds, medians over updates except the p99 of the pause; the copy is into memory that was touched."""
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    rows = [asyncio.run(_measure(name, *size, way)) for way in TRANSPORTS for name, size in SIZES.items()]
    return {"load before": before, "load after": os.getloadavg()[0], "rows": rows}


async def _measure(name: str, width: int, layers: int, updates: int, transport: Transport) -> dict[str, Any]:
    model = _model(width, layers)
    settings = EngineConfig(kv_cache_gib=0.25, max_concurrent_requests=REQUESTS)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = await Engine.start(
            Path(folder), settings, dtype="float32", max_context_tokens=512, seed=0, device="cpu", transport=transport
        )
        try:
            rounds = _Rounds(engine, model) if transport == "shared_memory" else _OverGroup(engine, model)
            await rounds.update()  # takes the memory that later ones use again
            idle = await rounds.by_processor(updates)
            generating = asyncio.create_task(_generate(engine))
            reports = [await rounds.update() for _ in range(updates + 2)][2:]
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)
        finally:
            await engine.stop()
    middle = {key: statistics.median(report[key] for report in reports) for key in reports[0]}
    pauses = sorted(report["paused_s"] - report["copy_s"] for report in reports)

    def times_the_copy(part: str) -> float:
        return statistics.median(report[part] / report["copy_s"] for report in reports)

    return {
        "model": f"{name}, {sum(p.nbytes for p in model.parameters()) / 2**20:.1f} MiB"
        + (f" over {transport}" if transport != "shared_memory" else ""),
        "copy": middle["copy_s"] * MS,
        "publish": middle["publish_s"] * MS,
        "prepare": middle["prepare_s"] * MS,
        "pause": middle["paused_s"] * MS,
        "of it load": middle["load_s"] * MS,
        "pause p99 less a copy": pauses[int(0.99 * len(pauses))] * MS,
        "total": middle["total_s"] * MS,
        "vllm packs": middle["packing_s"] * MS,
        "times the copy": times_the_copy("total_s"),
        "less packing": statistics.median((each["total_s"] - each["packing_s"]) / each["copy_s"] for each in reports),
        **{f"by processor: {part}": ratio for part, ratio in idle.items()},
    }


class _Rounds:
    """A copy, vLLM's packing alone, and an update, round after round."""

    def __init__(self, engine: Engine, model: Qwen3ForCausalLM) -> None:
        self.engine, self.model, self.version = engine, model, 0
        self.publisher, self.receiver = Publisher(), WeightReceiver(engine)
        self.engine_process = next(process.pid for process in multiprocessing.active_children() if process.pid)
        self.copy, self.packing = _copying(model), _packing(model)

    async def update(self) -> dict[str, float]:
        """Seconds by part."""
        copy_s, _ = _timed(self.copy)
        packing_s, _ = _timed(self.packing)
        publish_s, total_s, report = await self._update()
        await asyncio.sleep(0.05)  # some tokens
        parts = {key: float(report[key]) for key in ("prepare_s", "paused_s", "load_s")}
        return {"copy_s": copy_s, "packing_s": packing_s, "publish_s": publish_s, "total_s": total_s, **parts}

    async def by_processor(self, updates: int) -> dict[str, float]:
        """Processor seconds of the update and of its parts, over those of the copy."""
        copy_s = statistics.median(_timed(self.copy)[1] for _ in range(updates))
        packing_s = statistics.median(_timed(self.packing)[1] for _ in range(updates))
        publish_s = statistics.median([(await asyncio.to_thread(_timed, self._publish))[1] for _ in range(updates)])
        before = self._processor_s()
        for _ in range(updates):
            await self._update()
        total_s = (self._processor_s() - before) / updates
        return {
            "times the copy": total_s / copy_s,
            "less packing": (total_s - packing_s) / copy_s,
            "publish": publish_s / copy_s,
        }

    async def _update(self) -> tuple[float, float, dict[str, Any]]:
        started = time.perf_counter()
        publication = await asyncio.to_thread(self._publish)
        published = time.perf_counter()
        report = await self.receiver.apply(publication)
        done = time.perf_counter()
        if self.engine.version != self.version:
            raise RuntimeError(f"the engine has version {self.engine.version} after {self.version} was published")
        return published - started, done - started, report

    def _publish(self) -> Publication:
        self.version += 1
        return self.publisher.publish(self.model.named_parameters(), self.version)

    def _processor_s(self) -> float:
        """Processor seconds so far of this process and the engine's."""
        fields = Path(f"/proc/{self.engine_process}/stat").read_text().rpartition(")")[2].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _OverGroup(_Rounds):
    """As `_Rounds`; "publish" is what the learner's end takes, from the first step to the last."""

    def __init__(self, engine: Engine, model: Qwen3ForCausalLM) -> None:
        super().__init__(engine, model)
        self.client = _ClientHere(engine, DrivenUpdate(self.receiver, prepares=True))
        self.source, self.sender = WeightSource(model), None

    async def _update(self) -> tuple[float, float, dict[str, Any]]:
        started = time.perf_counter()
        await asyncio.to_thread(self._publish)
        took = time.perf_counter() - started
        return took, took, self.client.reports[self.engine.name]

    def _publish(self) -> None:  # type: ignore[override]
        self.version += 1
        self.client.begin(self.version, 60)
        if self.sender is None:
            settings = GlooSettings("127.0.0.1", BUCKET_BYTES, checksum=True)
            self.sender = GlooSender.form(self.client, self.source, settings)
        self.sender.send_weights()


class _ClientHere(EngineClient):
    """Of an engine in this process."""

    def __init__(self, engine: Engine, driven: DrivenUpdate) -> None:
        super().__init__({engine.name: driven}, ranks_per_engine=1)
        self.loop = asyncio.get_running_loop()

    def _answers(self, step: str, arguments: Any, within_s: float) -> dict[str, str]:
        for name, driven in self.workers.items():
            argument = arguments[name] if step == "connect" else arguments
            taken = asyncio.run_coroutine_threadsafe(driven.step(step, argument), self.loop)
            self.reports[name] = taken.result(within_s)
        return {}


def _timed(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock and of this thread's processor."""
    started, cpu = time.perf_counter(), time.thread_time()
    act()
    return time.perf_counter() - started, time.thread_time() - cpu


def _copying(model: Qwen3ForCausalLM) -> Callable[[], None]:
    """Copies all weights, tensor by tensor, into one buffer that has been written to before."""
    parts = [parameter.detach().reshape(-1).view(torch.uint8).numpy() for parameter in model.parameters()]
    buffer = np.zeros(sum(part.nbytes for part in parts), dtype=np.uint8)
    buffer[:] = 1

    def copy() -> None:
        offset = 0
        for part in parts:
            buffer[offset : offset + part.nbytes] = part
            offset += part.nbytes

    return copy


def _packing(model: Qwen3ForCausalLM) -> Callable[[], None]:
    """What vLLM's CPU layers do with each weight matrix, fused as they are there, and nothing else. The head is the embedding."""
    from vllm import _custom_ops as kernels

    matrices = [model.model.embed_tokens.weight.detach()]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for parts in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        ):
            matrices.append(torch.cat([part.weight.detach() for part in parts]))
    packed: list[Any] = [None] * len(matrices)

    def pack() -> None:
        for index, matrix in enumerate(matrices):
            packed[index] = kernels.create_onednn_mm(matrix.t(), 32)

    return pack


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
