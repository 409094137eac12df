"""The plain side of `toolrl bench learner`: what one writes first with transformers alone.

Rows padded to the longest of their micro-batch, whole logits, one pass after the other; for several updates the old
log-probabilities of all but the first are computed before it, as the learner does.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from benchmarks.sides.cases import CLIP, RATE, ROWS, Case, Sample, samples
from benchmarks.sides.process import Channel, Meter
from learner.planning import split_updates

EPSILON = 0.2


class Padded:
    """The loop and its model."""

    def __init__(self, model_dir: str, case: Case) -> None:
        self.samples, self.updates, self.batches = samples(case), case.updates, 0
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def step(self) -> float:
        """The gradient's norm, mean over the updates."""
        parts = split_updates([f"g{sample.group}" for sample in self.samples], self.updates, self.batches)
        self.batches += 1
        padded = [
            [Rows([self.samples[i] for i in part[at : at + ROWS]]) for at in range(0, len(part), ROWS)]
            for part in parts
        ]
        with torch.no_grad():
            old = [[self._logprobs(rows)[0] for rows in part] for part in padded[1:]]
        norms = []
        for index, part in enumerate(padded):
            count = sum(int(rows.mask.sum()) for rows in part)
            for number, rows in enumerate(part):
                logp, _ = self._logprobs(rows)
                before = logp.detach() if index == 0 else old[index - 1][number]
                ratio = (logp - before).exp()
                worse = torch.min(ratio * rows.advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * rows.advantages)
                (-(worse * rows.mask).sum() / count).backward()
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
    """A padded micro-batch: [B, T] ids and attention, [B, T - 1] mask and advantages of the tokens that are predicted."""

    def __init__(self, part: Sequence[Sample]) -> None:
        width = max(len(sample.prompt) + len(sample.response) for sample in part)
        self.ids = torch.zeros(len(part), width, dtype=torch.long)
        self.attention = torch.zeros(len(part), width, dtype=torch.long)
        self.mask = torch.zeros(len(part), width - 1, dtype=torch.bool)
        self.advantages = torch.zeros(len(part), width - 1)
        for row, sample in enumerate(part):
            prompt, size = len(sample.prompt), len(sample.prompt) + len(sample.response)
            self.ids[row, :prompt] = torch.from_numpy(sample.prompt)
            self.ids[row, prompt:size] = torch.from_numpy(sample.response)
            self.attention[row, :size] = 1
            self.mask[row, prompt - 1 : size - 1] = torch.from_numpy(sample.mask)
            self.advantages[row, prompt - 1 : size - 1] = sample.advantage


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    channel = Channel()
    side: Padded | None = None
    for request in channel.requests():
        if "case" in request:
            side = None
            side = Padded(arguments[0], Case(**request["case"]))
            meter = Meter()
            channel.answer()
            continue
        assert side is not None
        meter.start()
        norm = side.step()
        channel.answer(norm=norm, **meter.read())


if __name__ == "__main__":
    main(sys.argv[1:])
