"""TRL's side of `toolrl bench trl`: GRPOTrainer with a tool, through its own `train`.

It reads a request (a JSON file) and writes the curve: [seconds since training began, mean reward] after each batch. What is
TRL's stays TRL's: generation with transformers, the tool loop, `dapo` loss, advantages, AdamW; given are the batch sizes, the
rate, float32, and a limit of tokens a turn, which spares TRL the long tail of a turn that does not end.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer, chat_template_utils

from benchmarks.sides.trl_tool import SCHEMA, in_process

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def tool(failures: float, seed: int) -> Callable[[str], str]:
    """The tool, once TRL would show it as toolrl's side does. Raises RuntimeError where it would not."""
    made = in_process(failures, seed)
    if get_json_schema(made) != SCHEMA:
        raise RuntimeError(f"TRL shows the tool as {get_json_schema(made)}, toolrl as {SCHEMA}")
    return made


class Curve(TrainerCallback):
    """The clock, and the reward of each batch."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.began = 0.0
        self.rewards: list[float] = []
        self.points: list[tuple[float, float]] = []

    def reward(self, completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float]:
        """TRL's reward function: 1 where the last reply has the right answer in a box."""
        given = [_BOXED.findall(str(turns[-1].get("content") or "")) for turns in completions]
        scores = [float(bool(found) and found[-1].strip() == right) for found, right in zip(given, answer, strict=True)]
        self.rewards.append(sum(scores) / len(scores))
        return scores

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates == 0:
            self.points.append((time.monotonic() - self.began, self.rewards[-1]))


def check_prompt(trainer: GRPOTrainer, messages: list[dict[str, str]], wanted: list[int]) -> None:
    """Raises RuntimeError where TRL would show the model another prompt than toolrl does."""
    found = trainer._tokenize_prompts([messages])[0][0]
    if list(found) != wanted:
        tokenizer = trainer.processing_class
        raise RuntimeError(f"TRL's prompt\n{tokenizer.decode(found)}\ntoolrl's\n{tokenizer.decode(wanted)}")


def train(request: dict[str, Any]) -> list[tuple[float, float]]:
    """The curve."""
    torch.set_num_threads(request["threads"])
    tokenizer = AutoTokenizer.from_pretrained(request["model"], padding_side="left")
    # TRL knows the tool calls of this one, and trains with its training template instead.
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template
    curve = Curve(request["updates"])
    batch = request["groups"] * request["group"]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=request["batches"] * request["updates"],
            per_device_train_batch_size=batch // request["updates"],
            gradient_accumulation_steps=1,
            steps_per_generation=request["updates"],
            num_generations=request["group"],
            max_completion_length=request["response_tokens"],
            max_tool_calling_iterations=request["calls"],
            generation_kwargs={"max_new_tokens": request["turn_tokens"]},
            learning_rate=request["rate"],
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            shuffle_dataset=False,
            bf16=False,
            use_cpu=True,
            seed=request["seed"],
            logging_steps=request["updates"],
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
        )
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32, attn_implementation="sdpa"),
            reward_funcs=curve.reward,
            args=settings,
            train_dataset=Dataset.from_list(
                [{"prompt": task["messages"], "answer": task["answer"]} for task in request["tasks"]]
            ),
            processing_class=tokenizer,
            callbacks=[curve],
            tools=[tool(request["failures"], request["seed"])],
        )
        check_prompt(trainer, request["tasks"][0]["messages"], request["first_prompt_ids"])
        trainer.train()
    return curve.points


def main(arguments: Sequence[str]) -> None:
    request = json.loads(Path(arguments[0]).read_text())
    Path(request["target"]).write_text(json.dumps(train(request)))


if __name__ == "__main__":
    main(sys.argv[1:])
