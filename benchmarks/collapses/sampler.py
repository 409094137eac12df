"""An engine for a model of a few hundred thousand weights: requests that wait together are sampled together.

It stands where vLLM does: token ids in, sampled ids with the log-probabilities of what they were drawn from out. A token is
drawn by the inverse of the cumulated distribution, from numbers that belong to the request's seed: which requests share a
batch changes nothing beyond rounding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from actors.engine import Generated

GATHER_S = 0.005  # a request waits so long for others


@dataclass
class Request:
    """One turn to be sampled."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    stop_token_ids: frozenset[int]
    seed: int
    sampled: asyncio.Future[Generated]


class TorchEngine:
    """Samples from a transformers model on the CPU."""

    def __init__(self, model: Any, version: int = 0) -> None:
        self.model = model.eval()
        self.version = version
        self._waiting: list[Request] = []
        self._serving: asyncio.Task[None] | None = None

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Takes over weights under their Hugging Face names; what samples next samples from them."""
        self.model.load_state_dict(dict(weights), strict=False)
        self.version = version

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        stop_token_ids: list[int],
        seed: int | None,
        request_id: str,
    ) -> Generated:
        """See `actors.episode.GeneratesTokens`; the whole distribution alone is sampled (top_p 1, top_k -1)."""
        sampled: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        ends = frozenset(stop_token_ids)
        self._waiting.append(Request(prompt_ids, max_tokens, temperature, ends, seed or 0, sampled))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await sampled

    async def _serve(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_S)
            batch, self._waiting = self._waiting, []
            for request, generated in zip(batch, await asyncio.to_thread(self._sample, batch), strict=True):
                if not request.sampled.done():
                    request.sampled.set_result(generated)

    @torch.no_grad()
    def _sample(self, batch: list[Request]) -> list[Generated]:
        longest, steps = max(len(each.prompt_ids) for each in batch), max(each.max_tokens for each in batch)
        lacking = torch.tensor([longest - len(each.prompt_ids) for each in batch])
        ids = torch.tensor([[0] * int(pad) + each.prompt_ids for pad, each in zip(lacking, batch, strict=True)])
        seen = (torch.arange(longest) >= lacking[:, None]).long()
        drawn = torch.stack([torch.rand(steps, generator=torch.Generator().manual_seed(r.seed)) for r in batch])
        temperature = torch.tensor([[each.temperature] for each in batch])
        tokens: list[list[int]] = [[] for _ in batch]
        logprobs: list[list[float]] = [[] for _ in batch]
        finished: list[str | None] = [None for _ in batch]
        cache: Any = None
        for step in range(steps):
            positions = (seen.cumsum(-1) - 1)[:, -ids.shape[1] :].clamp(min=0)
            out = self.model(
                input_ids=ids, attention_mask=seen, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            logp = torch.log_softmax(out.logits[:, -1].float() / temperature, -1)
            chosen = _draw(logp, drawn[:, step])
            for row, (token, value) in enumerate(
                zip(chosen.tolist(), logp.gather(1, chosen)[:, 0].tolist(), strict=True)
            ):
                if finished[row] is None:
                    tokens[row].append(token[0])
                    logprobs[row].append(value)
                    finished[row] = _finish(batch[row], tokens[row])
            if None not in finished:
                break
            ids, seen = chosen, torch.cat([seen, torch.ones(len(batch), 1, dtype=seen.dtype)], 1)
        return [
            Generated(ids, values, [self.version] * len(ids), reason or "length", self.version)
            for ids, values, reason in zip(tokens, logprobs, finished, strict=True)
        ]


def _draw(logp: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """[B, 1] tokens from log-probabilities [B, V] by numbers [B] in [0, 1)."""
    cumulated = logp.double().exp().cumsum(-1)
    return torch.searchsorted(cumulated, drawn.double()[:, None] * cumulated[:, -1:], right=True).clamp(
        max=logp.shape[1] - 1
    )


def _finish(request: Request, tokens: list[int]) -> str | None:
    if tokens[-1] in request.stop_token_ids:
        return "stop"
    return "length" if len(tokens) >= request.max_tokens else None
