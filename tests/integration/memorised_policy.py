"""A policy that has learnt a few conversations by heart: where they part it takes either way, everything else it knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from toolrl.app.tiny_model import write_tiny_model
from toolrl.trajectory import Trajectory

STEPS = 160
LEARNING_RATE = 4e-3


def write_memorised_model(folder: Path, conversations: Sequence[Trajectory], seed: int = 0) -> float:
    """Trains the built-in tiny model on the policy's tokens; returns the last loss in nats a token."""
    write_tiny_model(folder, seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    width = max(len(each.token_ids) for each in conversations)
    ids = torch.zeros((len(conversations), width), dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, each in enumerate(conversations):
        prompt, tokens = len(each.prompt_ids), torch.tensor(each.token_ids)
        ids[row, : len(tokens)] = tokens
        sampled = torch.tensor([False] * prompt + each.policy_mask())
        labels[row, : len(tokens)] = torch.where(sampled, tokens, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, STEPS)
    loss = torch.zeros(())
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=labels).loss  # padding is behind what is read
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    return float(loss)
