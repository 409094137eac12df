"""One short check on a machine with a GPU: the learner's forward, loss and backward on a 0.6 B-shaped model in bfloat16.

Needs torch, triton, numpy and transformers alone (no Ray, vLLM, DeepSpeed). Says tokens/s, MFU, peak memory at 8 K and 32 K
tokens a micro-batch, and whether packed and chunked equals separate and whole. `make gpu-check`; under 8 minutes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from learner.attention import NAME as PACKED_ATTENTION
from learner.packing import pack
from learner.policy import PolicyModel
from learner.sequence import TrainSequence
from toolrl.algorithms import policy_losses

PEAK_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}  # dense
STEPS = 5


def model(vocabulary: int = 151_936) -> PolicyModel:
    """Qwen3-0.6B's shape with random weights."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
    )
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED_ATTENTION).cuda()
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return PolicyModel(lm, chunk=4096).train()


def sequences(tokens: int, longest: int, seed: int) -> list[TrainSequence]:
    """Multi-turn shaped: prompts of 256 tokens, responses with a hole for the tool's output; `tokens` in total."""
    draw = np.random.default_rng(seed)
    made, left = [], tokens
    while left > 300:
        total = min(left, int(draw.integers(longest // 4, longest + 1)))
        response = total - 256
        mask = np.ones(response, dtype=bool)
        mask[response // 3 : response // 2] = False
        zeros = np.zeros(response, dtype=np.float32)
        made.append(
            TrainSequence(
                token_ids=draw.integers(0, 150_000, size=total),
                prompt_length=256,
                policy_mask=mask,
                loss_mask=mask,
                rollout_logp=zeros,
                advantages=draw.standard_normal(response).astype(np.float32),
                turn_ids=np.where(mask, np.arange(response) >= response // 2, -1).astype(np.int32),
            )
        )
        left -= total
    return sorted(made, key=lambda s: -len(s.token_ids))


def step(policy: PolicyModel, batch: Any) -> None:
    logp, _ = policy(batch)
    grid = batch.grid(logp)
    loss = policy_losses.ctpo(grid, grid.detach() - 0.01, batch.advantages, batch.policy_mask.float()).token_loss
    (loss * batch.policy_mask).sum().backward()
    policy.zero_grad(set_to_none=True)


def speed(policy: PolicyModel, tokens: int, longest: int) -> dict[str, float]:
    batches = [pack(sequences(tokens, longest, seed)).on(torch.device("cuda")) for seed in range(STEPS)]
    step(policy, batches[0])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for batch in batches:
        step(policy, batch)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    total = sum(batch.input_ids.numel() for batch in batches)
    parameters = sum(p.numel() for p in policy.parameters())
    name = torch.cuda.get_device_name()
    peak = next((flops for kind, flops in PEAK_BF16_FLOPS.items() if kind in name), float("nan"))
    return {
        "tokens_per_s": total / seconds,
        "mfu": 6 * parameters * total / seconds / peak,  # attention and recomputation not counted
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def exactness(policy: PolicyModel) -> dict[str, float]:
    """Largest difference in log-probability between packed rows and the same sequences one by one, in bfloat16."""
    parts = sequences(4096, 1024, 7)
    with torch.no_grad():
        together = policy(pack(parts).on(torch.device("cuda")))[0]
        alone = torch.cat([policy(pack([part]).on(torch.device("cuda")))[0] for part in parts])
    return {"packed_vs_separate_max": float((together - alone).abs().max())}


def check() -> int:
    """Prints the figures as JSON; 1 where there is no GPU."""
    if not torch.cuda.is_available():
        print("no GPU here: torch.cuda.is_available() is False; run this where one is")
        return 1
    policy = model()
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **exactness(policy)}
    for tokens, longest in ((8192, 2048), (8192, 8192), (32_768, 8192), (32_768, 32_768)):
        result[f"{tokens} tokens, longest {longest}"] = speed(policy, tokens, longest)
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(check())
