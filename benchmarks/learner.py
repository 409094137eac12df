"""One training step of the learner beside a plain padded loop of transformers, and as a share of its bare passes.

All three get the same trajectories, the same tiny model in float32, one thread, and the same objective (CTPO, truncated
importance correction, AdamW, clipping); their gradient norms are compared. The floor makes the same forward and
backward passes over the packed tokens, and nothing else: no loss, no metrics, no DeepSpeed, no optimiser. The three
take turns, seconds are the processor's, and a ratio is the median over turns. It runs in a process of its own, because
DeepSpeed leaves its mark on the one it is in.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from learner.packing import model_tokens
from learner.planning import split_updates
from learner.rank import LearnerRank
from learner.sequence import TrainSequence
from learner.settings import RankSettings
from toolrl.algorithms import corrections, policy_losses
from toolrl.app.tiny_model import write_tiny_model
from toolrl.config import AlgorithmConfig, LearnerConfig

CASES = [(50, 48, 1), (50, 48, 4), (250, 24, 1), (2000, 4, 1)]  # prompt, trajectories, updates
ROUNDS = 3
GROUP = 8
ROWS = 8  # of a padded micro-batch
RATE, CLIP = 1e-4, 1.0
SAME_NORM = 1e-3


def run() -> dict[str, Any]:
    """`rows`: one a case. Tokens are those that a model must read; padding does not count."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    # -P: this file must not hide the package of its name.
    command = [sys.executable, "-P", str(Path(__file__).resolve())]
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"the learner's benchmark failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure() -> dict[str, Any]:
    """What `run` returns, in this process."""
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder), 0)
        rows = [case(folder, *numbers) for numbers in CASES]
    return {"load before": before, "load after": os.getloadavg()[0], "rows": rows}


def case(model_dir: str, prompt: int, count: int, updates: int) -> dict[str, Any]:
    """Tokens/s of the three, and the two ratios."""
    sequences = trajectories(prompt, count)
    tokens = sum(map(model_tokens, sequences))
    ours, padded = Ours(model_dir, updates), Padded(model_dir, updates)
    gap = abs(ours.step(sequences) / padded.step(sequences) - 1)  # the first, untimed, turn
    if gap > SAME_NORM:
        raise RuntimeError(f"the gradient norms of the learner and of the padded loop differ by {gap:.1%}")
    ours.floor(sequences)
    times = [[timed(work, sequences) for work in (ours.step, padded.step, ours.floor)] for _ in range(ROUNDS)]
    step_s, padded_s, floor_s = (statistics.median(column) for column in zip(*times, strict=True))
    longest = max(len(sequence.token_ids) for sequence in sequences)
    return {
        "prompt": prompt,
        "updates": updates,
        "mean/longest": f"{tokens / count:.0f}/{longest}",
        "learner tokens/s": tokens / step_s,
        "padded tokens/s": tokens / padded_s,
        "floor tokens/s": tokens / floor_s,
        "times the padded loop": statistics.median(b / a for a, b, _ in times),
        "share of the floor": statistics.median(c / a for a, _, c in times),
    }


def timed(work: Callable[[Sequence[TrainSequence]], float], sequences: Sequence[TrainSequence]) -> float:
    """Seconds of this process's processor: all three are bound by it, and what else runs here disturbs it less."""
    started = time.process_time()
    work(sequences)
    return time.process_time() - started


class Ours:
    """The learner, and the passes it makes."""

    def __init__(self, model_dir: str, updates: int) -> None:
        config = LearnerConfig(learning_rate=RATE, gradient_clip=CLIP, updates_per_batch=updates)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.rank = LearnerRank(RankSettings(model_dir, config, AlgorithmConfig()), port=port)

    def step(self, sequences: Sequence[TrainSequence]) -> float:
        return self.rank.train_batch(sequences)["grad/norm"]

    def floor(self, sequences: Sequence[TrainSequence]) -> float:
        parts = parted(sequences, self.rank.settings.learner.updates_per_batch, self.rank.batches)
        policy = self.rank.policy
        batches = [self.rank._my_batches(part) for part in parts]
        for batch in (batch for part in batches[1:] for batch in part):
            with torch.no_grad():
                policy(batch)
        for batch in (batch for part in batches for batch in part):
            policy(batch)[0].sum().backward()
        for parameter in policy.parameters():
            parameter.grad = None
        return 0.0


class Padded:
    """What one writes first: rows padded to the longest of their micro-batch, whole logits, one pass after the other."""

    def __init__(self, model_dir: str, updates: int) -> None:
        self.updates, self.batches = updates, 0
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def step(self, sequences: Sequence[TrainSequence]) -> float:
        parts = parted(sequences, self.updates, self.batches)
        self.batches += 1
        padded = [[Rows(part[at : at + ROWS]) for at in range(0, len(part), ROWS)] for part in parts]
        with torch.no_grad():
            old = [[self._logprobs(rows)[0] for rows in part] for part in padded[1:]]
        norms = []
        for index, part in enumerate(padded):
            count = sum(int(rows.mask.sum()) for rows in part)
            for number, rows in enumerate(part):
                logp, _ = self._logprobs(rows)
                before = logp.detach() if index == 0 else old[index - 1][number]
                found = policy_losses.ctpo(logp, before, rows.advantages, rows.mask, rows.mask)
                weight = corrections.tis(before, rows.rollout_logp, rows.mask)
                ((found.token_loss * weight * rows.mask).sum() / count).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return statistics.fmean(norms)

    def _logprobs(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities, entropies), [B, T - 1] both."""
        logits = self.model(input_ids=rows.ids, attention_mask=rows.attention, use_cache=False).logits[:, :-1].float()
        logp = logits.log_softmax(-1)
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)
        chosen = logp.gather(-1, rows.ids[:, 1:, None]).squeeze(-1)
        return torch.where(rows.mask, chosen, 0.0), entropy


class Rows:
    """A padded micro-batch: [B, T] ids, [B, T - 1] everything about the tokens that are predicted."""

    def __init__(self, part: Sequence[TrainSequence]) -> None:
        width = max(len(sequence.token_ids) for sequence in part)
        self.ids = torch.zeros(len(part), width, dtype=torch.long)
        self.attention = torch.zeros(len(part), width, dtype=torch.long)
        self.mask = torch.zeros(len(part), width - 1, dtype=torch.bool)
        self.advantages = torch.zeros(len(part), width - 1)
        self.rollout_logp = torch.zeros(len(part), width - 1)
        for row, sequence in enumerate(part):
            size, first = len(sequence.token_ids), sequence.prompt_length - 1
            self.ids[row, :size] = torch.from_numpy(sequence.token_ids)
            self.attention[row, :size] = 1
            for name in ("policy_mask", "advantages", "rollout_logp"):
                target = self.mask if name == "policy_mask" else getattr(self, name)
                target[row, first : size - 1] = torch.from_numpy(getattr(sequence, name))


def parted(sequences: Sequence[TrainSequence], updates: int, batches: int) -> list[list[TrainSequence]]:
    """The updates as `LearnerRank` splits them, with its default seed."""
    names = [sequence.group_id for sequence in sequences]
    return [[sequences[index] for index in part] for part in split_updates(names, updates, batches)]


def trajectories(prompt: int, count: int, seed: int = 0) -> list[TrainSequence]:
    """Groups of 8 that share the prompt's length (±20 %); 1 to 5 turns of 10 to 40 tokens, results of 5 to 60 between."""
    draw = np.random.default_rng(seed)
    made = []
    for index in range(count):
        if index % GROUP == 0:
            length = int(prompt * draw.uniform(0.8, 1.2))
        sizes = [(int(draw.integers(10, 41)), int(draw.integers(5, 61))) for _ in range(int(draw.integers(1, 6)))]
        turns = [np.r_[np.full(said, turn), np.full(shown, -1)] for turn, (said, shown) in enumerate(sizes)]
        turn_ids = np.concatenate(turns)[: -sizes[-1][1]].astype(np.int32)
        mask = turn_ids >= 0
        made.append(
            TrainSequence(
                token_ids=draw.integers(0, 512, length + len(mask)),
                prompt_length=length,
                policy_mask=mask,
                loss_mask=mask,
                rollout_logp=np.where(mask, draw.normal(-6.2, 0.1, len(mask)), 0).astype(np.float32),
                advantages=np.where(mask, draw.normal(0, 1, 6)[turn_ids], 0).astype(np.float32),
                turn_ids=turn_ids,
                trajectory_id=f"t{index}",
                group_id=f"g{index // GROUP}",
            )
        )
    return made


if __name__ == "__main__":
    print(json.dumps(measure()))
