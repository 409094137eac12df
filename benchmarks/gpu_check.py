"""One short check on a machine with a GPU: the learner's step on a 0.6 B-shaped model with random weights, in bfloat16.

Needs torch, triton, numpy and transformers alone (no Ray, vLLM, DeepSpeed). `make gpu-check`; under 8 minutes. It says, as
JSON: tokens/s, MFU and peak memory of a step (log-probabilities, CTPO loss, backward, clipping, AdamW) with 8 K and 32 K
tokens in a micro-batch; the same without objective and optimiser (the floor) and by a plain padded loop where its logits fit;
what sharing a group's prompt saves; how far packed is from separate. `--tiny`: the same logic on a CPU, in seconds.

MFU = FLOPs of the model / seconds / the GPU's dense bfloat16 peak. Counted are 6 a weight and token (the head's only where
it is used) and 6 · layers · width · n² of causal attention for a sequence of n tokens; recomputation is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from learner.attention import NAME as PACKED_ATTENTION
from learner.packing import PackedBatch, model_tokens, pack
from learner.policy import PolicyModel
from learner.sequence import TrainSequence
from toolrl.algorithms import policy_losses

PEAK_BF16_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "L40S": 362e12, "A100": 312e12}  # dense
STEPS = 5
LOGITS_GIB = 40.0  # a padded loop whose logits would take more is left out


@dataclass(frozen=True)
class Size:
    """A model's shape and what it is measured on."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    vocabulary: int
    prompt: int
    cases: tuple[tuple[int, int], ...]  # tokens a micro-batch, longest sequence
    device: str
    dtype: torch.dtype


CASES = ((8192, 2048), (8192, 8192), (32_768, 8192), (32_768, 32_768))
QWEN3_06B = Size(1024, 28, 16, 128, 151_936, 256, CASES, "cuda", torch.bfloat16)
TINY = Size(64, 2, 4, 16, 512, 16, ((256, 64), (256, 256)), "cpu", torch.float32)


def build(size: Size, attention: str, *, checkpointing: bool) -> Any:
    """A Qwen3 of this size with random weights, the same for every call."""
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        head_dim=size.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=size.dtype, attn_implementation=attention).to(size.device)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def sequences(size: Size, tokens: int, longest: int, seed: int, group: int = 1) -> list[TrainSequence]:
    """About `tokens` tokens: `group` at a time share a prompt; a third of the way the response has a tool's output."""
    draw = np.random.default_rng(seed)
    made: list[TrainSequence] = []
    left = tokens
    while left > 2 * size.prompt or not made:
        prompt = draw.integers(0, size.vocabulary, size.prompt)
        for _ in range(group):
            total = max(2 * size.prompt, min(left, int(draw.integers(longest // 4, longest + 1))))
            made.append(_sequence(draw, prompt, total, size.vocabulary))
            left -= total
    return sorted(made, key=lambda sequence: -len(sequence.token_ids))


def _sequence(draw: np.random.Generator, prompt: np.ndarray, total: int, vocabulary: int) -> TrainSequence:
    response = total - len(prompt)
    mask = np.ones(response, dtype=bool)
    mask[response // 3 : response // 2] = False
    return TrainSequence(
        token_ids=np.concatenate([prompt, draw.integers(0, vocabulary, response)]),
        prompt_length=len(prompt),
        policy_mask=mask,
        loss_mask=mask,
        rollout_logp=np.zeros(response, dtype=np.float32),
        advantages=draw.standard_normal(response).astype(np.float32),
        turn_ids=np.where(mask, np.arange(response) >= response // 2, -1).astype(np.int32),
    )


def step(policy: PolicyModel, optimizer: torch.optim.Optimizer, batch: PackedBatch) -> None:
    """The learner's step on one micro-batch."""
    logp = batch.grid(policy(batch)[0])
    loss = policy_losses.ctpo(logp, logp.detach() - 0.01, batch.advantages, batch.policy_mask.float()).token_loss
    ((loss * batch.policy_mask).sum() / batch.policy_mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def floor(policy: PolicyModel, batch: PackedBatch) -> None:
    policy(batch)[0].sum().backward()
    policy.zero_grad(set_to_none=True)


def padded(model: Any, optimizer: torch.optim.Optimizer, made: Sequence[TrainSequence]) -> None:
    """What one writes first: rows padded to the longest, whole logits, GRPO's loss."""
    device = model.device
    width = max(len(sequence.token_ids) for sequence in made)
    ids, mask, advantages = (torch.zeros(len(made), width, device=device) for _ in range(3))
    for row, sequence in enumerate(made):
        ids[row, : len(sequence.token_ids)] = torch.from_numpy(sequence.token_ids).to(ids)
        at = slice(sequence.prompt_length, len(sequence.token_ids))
        mask[row, at] = torch.from_numpy(sequence.policy_mask).to(ids)
        advantages[row, at] = torch.from_numpy(sequence.advantages).to(ids)
    attention = torch.zeros_like(ids, dtype=torch.long)
    for row, sequence in enumerate(made):
        attention[row, : len(sequence.token_ids)] = 1
    logits = model(input_ids=ids.long(), attention_mask=attention, use_cache=False).logits[:, :-1].float()
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None].long()).squeeze(-1)
    ((logp - logp.detach()).exp() * -advantages[:, 1:] * mask[:, 1:]).sum().div(mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def timed(size: Size, work: Callable[[Any], None], items: Sequence[Any]) -> tuple[float, float | None]:
    """(seconds of all but the first, which warms up; the peak of all in GiB, None on a CPU)."""
    if size.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    work(items[0])
    _finish(size)
    started = time.perf_counter()
    for item in items[1:]:
        work(item)
    _finish(size)
    seconds = time.perf_counter() - started
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if size.device == "cuda" else None


def _finish(size: Size) -> None:
    if size.device == "cuda":
        torch.cuda.synchronize()


def flops(size: Size, made: Sequence[TrainSequence], parameters: int) -> float:
    """Of forward and backward over these sequences by themselves; see the module."""
    head = size.vocabulary * size.hidden
    width = size.heads * size.head_dim
    lengths = np.array([model_tokens(sequence) for sequence in made], dtype=np.float64)
    predicted = sum(int(sequence.policy_mask.sum()) for sequence in made)
    dense = 6 * (parameters - head) * lengths.sum() + 6 * head * predicted
    return float(dense + 6 * size.layers * width * (lengths**2).sum())


def measure(size: Size, tokens: int, longest: int) -> dict[str, Any]:
    """One case: the step, its floor, the padded loop."""
    batches = [sequences(size, tokens, longest, seed) for seed in range(STEPS + 1)]
    packed = [pack(made, "off").on(torch.device(size.device)) for made in batches]
    policy = PolicyModel(build(size, PACKED_ATTENTION, checkpointing=tokens > 8192), chunk=4096)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    seconds, peak = timed(size, partial(step, policy, optimizer), packed)
    floor_s, _ = timed(size, partial(floor, policy), packed)
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    work = sum(flops(size, made, parameters) for made in batches[1:])
    total = sum(model_tokens(sequence) for made in batches[1:] for sequence in made)
    best = peak_flops(size)
    found: dict[str, Any] = {
        "tokens_per_s": total / seconds,
        "mfu": work / seconds / best if best else None,
        "share_of_floor": floor_s / seconds,
        "peak_gib": peak,
        "gradient_checkpointing": tokens > 8192,
    }
    del policy, optimizer, packed
    rows = max(len(made) * len(made[0].token_ids) for made in batches)
    if rows * size.vocabulary * 4 * 3 / 2**30 > LOGITS_GIB:  # logits, their softmax, its gradient
        return found | {"times_padded": None, "padded_peak_gib": None}
    plain = build(size, "sdpa", checkpointing=tokens > 8192)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    padded_s, padded_peak = timed(size, partial(padded, plain, adam), batches)
    return found | {"times_padded": padded_s / seconds, "padded_peak_gib": padded_peak}


def sharing(size: Size) -> dict[str, float]:
    """Seconds of a step on groups of 8 whose prompt is half of each sequence: prompts apart / prompts shared."""
    tokens, longest = size.cases[0]
    big = replace(size, prompt=longest // 2)
    batches = [sequences(big, tokens, longest, seed, group=8) for seed in range(STEPS + 1)]
    policy = PolicyModel(build(size, PACKED_ATTENTION, checkpointing=False), chunk=4096)
    spent = {}
    for share in ("off", "on"):
        packed = [pack(made, share).on(torch.device(size.device)) for made in batches]
        spent[share], _ = timed(size, partial(floor, policy), packed)
    return {"sharing_prompts_speeds_up_by": spent["off"] / spent["on"]}


def exactness(size: Size) -> dict[str, float]:
    """Largest difference in log-probability between packed rows and the same sequences one by one."""
    tokens, longest = size.cases[0]
    parts = sequences(size, tokens // 2, longest // 2, 7)
    policy = PolicyModel(build(size, PACKED_ATTENTION, checkpointing=False), chunk=4096)
    with torch.no_grad():
        together = policy(pack(parts, "off").on(torch.device(size.device)))[0]
        alone = torch.cat([policy(pack([part], "off").on(torch.device(size.device)))[0] for part in parts])
    return {"packed_vs_separate_max": float((together - alone).abs().max())}


def peak_flops(size: Size) -> float | None:
    """The GPU's; None on a CPU or where it is not known."""
    name = torch.cuda.get_device_name() if size.device == "cuda" else ""
    return next((best for kind, best in PEAK_BF16_FLOPS.items() if kind in name), None)


def check(arguments: Sequence[str]) -> int:
    """Prints the figures as JSON; 1 where there is no GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU: does it run at all?")
    size = TINY if parser.parse_args(arguments).tiny else QWEN3_06B
    if size.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: torch.cuda.is_available() is False; run this where one is, or with --tiny")
        return 1
    name = torch.cuda.get_device_name() if size.device == "cuda" else "CPU"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, **exactness(size), **sharing(size)}
    for tokens, longest in size.cases:
        result[f"{tokens} tokens, longest {longest}"] = measure(size, tokens, longest)
        if size.device == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(check(sys.argv[1:]))
