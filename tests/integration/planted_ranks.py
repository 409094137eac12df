"""What a process of `test_guards_planted_learner` does: a real learner on real traces, left alone or with a plant."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from benchmarks.collapses.plants import mean_state, raise_logits
from learner.rank import LearnerRank
from learner.sequence import sequences_from
from learner.settings import RankSettings
from tests.unit.test_cold_start_traces import CONFIG, TOKENIZER, HereInterpreter
from toolrl import presets, tasks, toolcalls
from toolrl.app.cold_start import batches
from toolrl.app.cold_start_traces import TraceMaker
from toolrl.app.tiny_model import write_tiny_model
from toolrl.conversation import ChatFormat
from toolrl.monitors.control_tokens import ControlTokens
from toolrl.tools import Toolbox
from toolrl.trajectory import Trajectory

STEPS, PLANTED_AT, BATCH, LEARNT = 9, 5, 16, 50
SPREADING = ["<tool_call>", "</tool_call>", "<|im_start|>"]


def learn_and_plant(rank_index: int, world: int, port: int, folder: Path) -> None:
    """Writes `rows.json`: {plant: rows of metrics}."""
    config = presets.load("quickstart-cpu", ["learner.schedule=constant", "monitors.trajectories=24"])
    parser = toolcalls.get("hermes")
    toolbox = Toolbox.build(CONFIG.tools, interpreter=HereInterpreter(), seed=0)
    chat = ChatFormat(TOKENIZER, tools=toolbox.schemas, parser=parser)
    traces = _right_ones(chat, parser)
    write_tiny_model(folder / "model", 0)
    settings = RankSettings(
        str(folder / "model"),
        config.learner,
        config.algorithm,
        monitors=config.monitors,
        control=ControlTokens.of(TOKENIZER, chat, parser),
    )
    rank = LearnerRank(settings, port=port)
    sequences = sequences_from(traces, [[0.0] * len(each.policy_turns) for each in traces])
    for chosen in batches(len(sequences), BATCH, LEARNT, seed=0):
        rank.supervised_batch([sequences[index] for index in chosen], 4e-3)
    rank.reset_optimizer()
    run = Run(rank, traces, AutoModelForCausalLM.from_pretrained(folder / "model"))
    healthy = [run.step(step) for step in range(1, PLANTED_AT)]
    rank.save_checkpoint(folder / "before")
    rows: dict[str, Any] = {}
    for plant in ("none", "sinking", "spreading"):
        rank.load_checkpoint(folder / "before")
        rows[plant] = healthy + [run.step(step, plant) for step in range(PLANTED_AT, STEPS + 1)]
    (folder / "rows.json").write_text(json.dumps(rows))


def _right_ones(chat: ChatFormat, parser: Any) -> list[Trajectory]:
    """Traces that call and are right."""
    maker = TraceMaker(CONFIG, TOKENIZER, chat, parser, tasks.build(CONFIG.tasks, CONFIG.seed))
    return [each for each in asyncio.run(maker.make(HereInterpreter())) if each.metadata["kind"] == "solved"]


class Run:
    """Learns from the traces as if the policy had sampled them, which it nearly would have."""

    def __init__(self, rank: LearnerRank, traces: list[Trajectory], model: Any) -> None:
        self.rank, self.traces, self.model = rank, traces, model
        self.sequences = sequences_from(traces, [[1.0] * len(each.policy_turns) for each in traces])
        self.drawn = list(batches(len(traces), BATCH, STEPS, seed=1))

    def step(self, number: int, plant: str = "none") -> dict[str, float]:
        chosen = self.drawn[number - 1]
        if plant == "spreading":
            weights = dict(self.rank.weight_source())
            self.model.load_state_dict(weights, strict=False)
            state = mean_state(self.model, [self.traces[index] for index in chosen[:8]])
            raise_logits(weights["model.embed_tokens.weight"], TOKENIZER.convert_tokens_to_ids(SPREADING), state, 1.0)
        batch = [self.sequences[index] for index in chosen]
        known = self.rank.logprobs(batch)
        sign = -1.0 if plant == "sinking" else 1.0
        batch = [
            replace(each, rollout_logp=known[index], advantages=sign * each.advantages, is_correct=True)
            for index, each in enumerate(batch)
        ]
        return {"step": number, **self.rank.train_batch(batch)}
