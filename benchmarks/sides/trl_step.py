"""TRL's side of `toolrl bench learner`: its own GRPOTrainer and its own loop, fed with ready-made trajectories.

They come in through TRL's `rollout_func`, with `env_mask` for the tokens that tools wrote (TRL's tool mask). A turn is
what TRL does between two generations: padding, old log-probabilities where it wants them, rewards and advantages, loss,
backward, clipping, AdamW, its metrics.

The same as the learner's step: trajectories, masks, advantages, GRPO's token loss with a mean over the batch's policy tokens
(TRL's `dapo` with ε 0.2 on both sides, no KL), AdamW and clipping, float32, no gradient checkpointing (TRL's default is to use
it, which is slower and takes less memory). With one update the gradient norms are compared; with several, TRL parts the batch
by single trajectories and the learner by groups, so they are not.
Not the same: TRL computes old log-probabilities of the whole batch where it takes several updates, the learner of all but
the first; TRL also decodes the completions to text, some milliseconds a batch. Both are part of TRL's step and stay in.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.sides.cases import CLIP, GROUP, RATE, ROWS, Case, samples
from benchmarks.sides.process import Channel, Meter

EPSILON = 0.2


class Rounds(TrainerCallback):
    """Waits for the parent where TRL would generate, and answers after the batch's last optimiser step."""

    def __init__(self, channel: Channel, case: Case) -> None:
        self.samples, self.updates = samples(case), case.updates
        self.channel, self.waiting = channel, channel.requests()
        self.meter: Meter | None = None
        self.norms: list[float] = []

    def rollouts(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: the case's trajectories, whatever the prompts."""
        if self.meter is None:
            self.meter = Meter()
            self.channel.answer()
        next(self.waiting)
        self.meter.start()
        return {
            "prompt_ids": [sample.prompt.tolist() for sample in self.samples],
            "completion_ids": [sample.response.tolist() for sample in self.samples],
            "logprobs": [[0.0] * len(sample.response) for sample in self.samples],  # of vLLM, which is not used
            "env_mask": [sample.mask.astype(int).tolist() for sample in self.samples],
            "score": [sample.reward for sample in self.samples],
        }

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "grad_norm" not in logs:
            return
        self.norms.append(float(logs["grad_norm"]))
        if state.global_step % self.updates == 0:
            assert self.meter is not None
            self.channel.answer(norm=sum(self.norms) / len(self.norms), **self.meter.read())
            self.norms = []


def score(score: list[float], **_: Any) -> list[float]:
    """The reward function: what came with the trajectories."""
    return score


def train(model_dir: str, case: Case, rounds: int, channel: Channel) -> None:
    """`rounds` batches of the case, through TRL's own `train`."""
    micro_batches = case.groups * GROUP // ROWS
    callback = Rounds(channel, case)
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=rounds * case.updates,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=micro_batches // case.updates,
            steps_per_generation=micro_batches,
            num_generations=GROUP,
            loss_type="dapo",
            epsilon=EPSILON,
            beta=0.0,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=CLIP,
            gradient_checkpointing=False,
            max_completion_length=4096,
            bf16=False,
            use_cpu=True,
            seed=0,
            logging_steps=1,
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
        )
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa"),
            reward_funcs=score,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": [f"question {index}" for index in range(case.groups)]}),
            processing_class=AutoTokenizer.from_pretrained(model_dir, padding_side="left"),
            callbacks=[callback],
            rollout_func=callback.rollouts,
        )
        trainer.train()


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    channel = Channel()
    for request in channel.requests():
        train(arguments[0], Case(**request["case"]), request["rounds"], channel)


if __name__ == "__main__":
    main(sys.argv[1:])
