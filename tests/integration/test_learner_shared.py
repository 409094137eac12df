"""Real DeepSpeed ranks with shared prefixes: gradients and log-probabilities are those of separate rows, however it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.requirements import need

need("deepspeed", "torch", "transformers")

import torch

from learner.sequence import TrainSequence
from tests.integration.learner_ranks import finish, run_ranks
from tests.integration.test_learner_exact import gradients, settings
from tests.unit.learner_fixtures import VOCABULARY, random_sequences
from toolrl.app.tiny_model import write_tiny_model

# (stage, share, tokens of a micro-batch): a family is whole, or cut over ranks and micro-batches.
CASES = [(0, "off", 100_000), (0, "on", 100_000), (0, "on", 140), (3, "on", 140)]


def families() -> list[TrainSequence]:
    """Three groups of four behind prompts of 48 tokens, two members of each with one more history in common."""
    draw = np.random.default_rng(0)
    made = random_sequences(12, seed=3, group_size=4)
    for index, each in enumerate(made):
        if index % 4 == 0:
            prompt, history = draw.integers(0, VOCABULARY, 48), draw.integers(0, VOCABULARY, 20)
        extra = history if index % 4 > 1 else history[:0]
        each.token_ids = np.concatenate([prompt, extra, each.token_ids])
        each.prompt_length += len(prompt) + len(extra)
    return made


def every_case(rank: int, world: int, port: int, folder: Path, model_dir: Path) -> None:
    from learner.rank import LearnerRank

    sequences = families()
    for stage, share, cap in CASES:
        wanted = settings(model_dir, zero_stage=stage, share_prefixes=share, tokens_per_micro_batch=cap)
        made = LearnerRank(wanted, rank=rank, world=world, port=port)
        logps = made.logprobs(sequences)
        read = sum(micro.batch.input_ids.numel() for micro in made.micro_batches.of(sequences))
        made.train_batch(sequences)
        result = {"logps": logps, "read": read, "gradients": gradients(made)}
        torch.save(result, folder / f"{rank}_{stage}_{share}_{cap}.pt")


def test_shared_prefixes_change_neither_gradient_nor_log_probability(tmp_path):
    model_dir = tmp_path / "model"
    write_tiny_model(model_dir, 0)
    finish(run_ranks(every_case, 2, tmp_path, model_dir), tmp_path)
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for path in sorted(tmp_path.glob("*_*.pt")):
        _, *case = path.stem.split("_")
        found.setdefault(tuple(case), []).append(torch.load(path, weights_only=False))
    assert len(found) == len(CASES)
    base = found["0", "off", "100000"]
    expected = {index: logp for part in base for index, logp in part["logps"].items()}
    largest = max(float(gradient.abs().max()) for gradient in base[0]["gradients"].values())
    for case, ranks in found.items():
        logps = {index: logp for part in ranks for index, logp in part["logps"].items()}
        assert sorted(logps) == list(range(12))
        for index, logp in logps.items():
            np.testing.assert_allclose(logp, expected[index], atol=1e-5, err_msg=str(case))
        for name, gradient in ranks[0]["gradients"].items():
            gap = float((gradient - base[0]["gradients"][name]).abs().max())
            assert gap < 2e-6 * largest + 1e-9, (case, name, gap, largest)
    read = {case: sum(part["read"] for part in ranks) for case, ranks in found.items()}
    assert read["0", "on", "100000"] < 0.6 * read["0", "off", "100000"]
    assert read["0", "on", "100000"] <= read["0", "on", "140"] < read["0", "off", "100000"]
