"""A whole `toolrl train` with every reward that needs a model: a process reward model whose worker is killed on the way,
Monte-Carlo values on the run's own engine and interpreters, and what the learner says of results. One run serves every test."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.requirements import need

need("ray", "vllm", "deepspeed")

import ray
import torch
from transformers import AutoModelForSequenceClassification, Qwen3Config

from actors.replay import read_ledger, read_trajectories
from sandbox import SandboxConfig, SandboxPool
from tests.episodes import END, call, play, tiny
from tests.integration.memorised_policy import write_memorised_model
from toolrl import presets
from toolrl.app.tiny_tokenizer import PAD, VOCABULARY_SIZE
from toolrl.app.train import train
from toolrl.config_model_rewards import options_in_effect
from toolrl.ledger import Ledger
from toolrl.monitors.metrics_log import read_metrics
from toolrl.rewards.prm import PrmOptions
from toolrl.rewards.step_classifier import StepClassifier
from toolrl.rewards.step_scores import gains
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory

pytestmark = pytest.mark.timeout(420)

STEPS, GROUPS, SIZE = 2, 2, 6
K = 4
QUESTION, ANSWER = "17 * 24?", "408"
SYSTEM = "Use python."


def code(text: str) -> str:
    return call(name="python").replace('"expression": "17 * 24"', f'"code": "{text}"')


# What the policy knows by heart; where they part it takes either way. The first turn's variable decides what the second
# prints, and the answer is what was printed: continuations have to find the variable in their interpreter.
RIGHT, WRONG, SHOW, RUIN = code("x = 408"), code("x = 41"), code("print(x)"), code("x = 41; print(x)")
CONVERSATIONS = [
    [RIGHT, SHOW, f"\\boxed{{408}}{END}"],
    [RIGHT, RUIN, f"\\boxed{{41}}{END}"],
    *[[WRONG, SHOW, f"\\boxed{{41}}{END}"]] * 2,
]


async def conversations() -> list[Trajectory]:
    """As the run's own chat format and interpreters write them."""
    task = Task(
        "t", "rows", [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}], ANSWER, "math"
    )
    async with SandboxPool(SandboxConfig(backend="process", min_sessions=1, max_sessions=2)) as pool:
        return [
            await play(*turns, task=task, tool_names=["python"], interpreter=pool, components=["format"])
            for turns in CONVERSATIONS
        ]


def write_classifier(folder: Path) -> Path:
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
        pad_token_id=tiny().convert_tokens_to_ids(PAD),
    )
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tiny().save_pretrained(folder)
    return folder


class Killer(threading.Thread):
    """Kills the first reward worker as soon as a reward of its has arrived."""

    def __init__(self, ledger: Path, actor: str) -> None:
        super().__init__(daemon=True)
        self.ledger, self.actor = ledger, actor
        self.killed = False

    def run(self) -> None:
        while not self.killed:
            time.sleep(0.05)
            if self.ledger.exists() and read_ledger(self.ledger).late_rewards.get("accepted", 0) and self._delivered():
                ray.kill(ray.get_actor(self.actor, namespace="toolrl"), no_restart=True)
                self.killed = True

    def _delivered(self) -> bool:
        return any("prm" in turn.rewards for each in read_trajectories(self.ledger) for turn in each.policy_turns)


@dataclass
class Run:
    rows: list[dict[str, float]]
    ledger: Ledger
    trajectories: list[Trajectory]
    prm: PrmOptions
    model_dir: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    import asyncio

    place = tmp_path_factory.mktemp("model-rewards")
    loss = write_memorised_model(place / "policy", asyncio.run(conversations()))
    assert loss < 0.1, "it knows them by heart, but for the forks"
    write_classifier(place / "prm")
    (place / "tasks.jsonl").write_text(
        json.dumps({"prompt": QUESTION, "reward_model": {"ground_truth": ANSWER}}) + "\n"
    )
    prm = f"{{name: prm, options: {{model: {place / 'prm'}, batch_size: 4}}}}"
    monte_carlo = f"{{name: monte_carlo, options: {{share: 1.0, continuations: {K}, concurrency: 8}}}}"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.getcwd())
        settings = [
            "name=measured",
            "quiet=true",
            f"runs_dir={place}",
            f"model.path={place / 'policy'}",
            f"tasks={{kind: rows, path: {place / 'tasks.jsonl'}, families: [], held_out_tasks: 0, system_prompt: {SYSTEM}}}",
            "tools.0.failure_rate=0",
            "rollout.temperature=0.5",  # what it knows by heart it then says as it is
            f"rewards.components=[outcome, {prm}, {monte_carlo}, {{name: masked_result, options: {{share: 1.0}}}},"
            " {name: attention_mass, options: {share: 1.0}}]",
            "rewards.weights={prm: 0.5}",
            "rewards.late.deadline_s=90",
            "sandbox={backend: process, min_sessions: 2, max_sessions: 12}",
            "buffer.max_staleness=0",
            "cold_start.steps=0",
            "learner.updates_per_batch=1",
            "learner.learning_rate=1e-7",
            f"loop.steps={STEPS}",
            f"loop.groups_per_step={GROUPS}",
            f"loop.group_size={SIZE}",
        ]
        config = presets.load("quickstart-cpu", settings)
        folder = place / config.name
        killer = Killer(folder / "ledger.sqlite", f"{config.name}/reward-0")
        killer.start()
        train(config)
        assert killer.killed
    options = options_in_effect(config.rewards, "prm")
    assert options is not None
    yield Run(
        read_metrics(folder),
        read_ledger(folder / "ledger.sqlite"),
        list(read_trajectories(folder / "ledger.sqlite")),
        PrmOptions(**options),
        folder / "model",
    )


def codes(trajectory: Trajectory) -> list[str]:
    return [each.arguments["code"] for turn in trajectory.policy_turns for each in turn.calls]


def values(trajectory: Trajectory) -> list[float]:
    """Of its prompt and its steps, from what its turns earned: after the last one it is the trajectory's own score."""
    earned = [turn.rewards["monte_carlo"] for turn in trajectory.policy_turns]
    start = float(trajectory.answer == ANSWER) - sum(earned)
    return [start + sum(earned[:turn]) for turn in range(1 + len(earned))]


def test_a_step_that_settles_the_answer_is_worth_1_and_one_that_ruins_it_0(run: Run) -> None:
    seen, at_the_fork = set(), []
    prompts: dict[str, set[float]] = {}
    for each in run.trajectories:
        assert len(codes(each)) == 2, "learnt by heart"
        first, second = codes(each)
        seen.add((first, second))
        start, after_first, after_second, _ = values(each)
        prompts.setdefault(each.group_id, set()).add(round(start, 6))
        if (first, second) == ("x = 408", "print(x)"):
            assert after_second == pytest.approx(1.0)
        else:
            assert after_second == pytest.approx(0.0), "it prints 41"
        if first == "x = 41":
            assert after_first == pytest.approx(0.0)
        else:
            at_the_fork.append(after_first)
    assert len(seen) == 3, seen
    assert all(value * K == pytest.approx(round(value * K)) for value in at_the_fork)
    assert 0.2 < sum(at_the_fork) / len(at_the_fork) < 0.8, "from here it goes either way"
    assert all(len(starts) == 1 for starts in prompts.values()), "a group's members are compared with one value"
    assert 0.0 < sum(start for starts in prompts.values() for start in starts) / len(prompts) < 0.6


def test_continuations_are_no_samples(run: Run) -> None:
    assert run.ledger.balances and run.ledger.issued == STEPS * GROUPS * SIZE
    assert run.ledger.trained + sum(run.ledger.dropped.values()) == run.ledger.issued
    last = run.rows[-1]
    played = last["monte_carlo/continuations"] + last["monte_carlo/continuations_unscored"]
    assert played == K * 2 * run.ledger.trained + 2 * K * STEPS * GROUPS, "two boundaries each, and the prompts"
    assert all("branched_from" not in each.metadata for each in run.trajectories)


def test_the_process_reward_model_scores_every_step_also_after_its_worker_died(run: Run) -> None:
    scores = StepClassifier(run.prm, str(run.model_dir)).score(run.trajectories)
    for each, (start, *of_steps) in zip(run.trajectories, scores, strict=True):
        earned = [turn.rewards["prm"] for turn in each.policy_turns]
        assert earned == pytest.approx([0.5 * gain for gain in gains(of_steps, "last", start)], abs=1e-5)
    assert run.rows[-1]["reward_worker/replaced"] == 1.0
    assert run.ledger.late_rewards["accepted"] == 2 * run.ledger.trained


def test_the_learner_is_asked_about_results_before_advantages(run: Run) -> None:
    for row in run.rows:
        assert row["reward/component/masked_result"] > 0.0, "it answers what was printed"
        assert 0.0 < row["reward/component/attention_mass"] < 2.0
