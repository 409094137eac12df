"""Every recipe trains: a tiny model through the loop's own `learn` on a real learner rank, with groups made by hand.

One process does all recipes, because importing the libraries costs more than the recipes.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.requirements import need

need("ray", "deepspeed", "torch", "transformers")

import torch

from learner.sequence import TrainSequence
from learner.settings import RankSettings
from learner.turns import bare_sequences
from tests.integration.learner_ranks import finish, run_ranks
from toolrl import presets
from toolrl.app.answer_hints import AnswerHints
from toolrl.app.parts import Parts
from toolrl.app.tiny_model import write_tiny_model
from toolrl.app.train import learn
from toolrl.config import RunConfig
from toolrl.presets import recipes
from toolrl.trajectory import Outcome, ToolCall, ToolResult, Trajectory, Turn

GROUPS, SIZE, BATCHES = 4, 4, 3
SETTINGS = [
    f"loop.groups_per_step={GROUPS}",
    f"loop.group_size={SIZE}",
    "learner.learning_rate=1e-3",
    "learner.warmup_steps=0",
    "learner.schedule=constant",
]


class OneRank:
    """The part of `LearnerGroup` that `learn` needs, for a rank in this process."""

    def __init__(self, rank: Any) -> None:
        self.rank = rank

    async def train(self, sequences: list[TrainSequence]) -> dict[str, float]:
        metrics: dict[str, float] = self.rank.train_batch(sequences)
        return metrics

    def __getattr__(self, name: str) -> Any:
        async def read(sequences: list[TrainSequence]) -> list[np.ndarray]:
            found = getattr(self.rank, name)(sequences)
            return [found[index] for index in range(len(sequences))]

        return read


def rank_of(config: RunConfig, model_dir: Path, port: int) -> Any:
    from learner.rank import LearnerRank

    settings = RankSettings(
        model_dir=str(model_dir),
        learner=config.learner,
        algorithm=config.algorithm,
        critic=config.critic,
        total_steps=BATCHES * config.learner.updates_per_batch,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    return LearnerRank(settings, port=port)


def groups_of(hints: AnswerHints, rank: Any) -> list[list[Trajectory]]:
    """One call, then an answer, half of them right; what was sampled is random, its log-probabilities the policy's own."""
    generator = np.random.default_rng(5)
    groups = []
    for task_index in range(GROUPS):
        task = hints.tasks.task(task_index)
        group = []
        for sample in range(SIZE):
            tokens = [generator.integers(20, 400, size).tolist() for size in (6, 4 + sample)]
            call, answer = (Turn("policy", ids, [0.0] * len(ids), [0] * len(ids)) for ids in tokens)
            call.calls = [ToolCall("call_0", "python", {"code": f"print({sample % 2})"})]
            shown = Turn("tool", [30, 31, 32], results=[ToolResult("call_0", "python", "ok", "1")])
            group.append(
                Trajectory(
                    f"g{task_index:06d}.{sample}",
                    f"g{task_index:06d}",
                    task.id,
                    sample,
                    hints.chat.prompt_ids(task.messages),
                    [call, shown, answer],
                    outcome=Outcome.ANSWERED,
                    answer="1",
                    rewards={"outcome": float(sample % 2)},
                )
            )
        groups.append(group)
    members = [member for group in groups for member in group]
    for member, logps in zip(members, logprobs(rank, members), strict=True):
        ends = np.cumsum([len(turn.token_ids) for turn in member.policy_turns])[:-1]
        for turn, part in zip(member.policy_turns, np.split(logps, ends), strict=True):
            turn.logprobs = part.tolist()
    return groups


def logprobs(rank: Any, members: list[Trajectory]) -> list[np.ndarray]:
    sequences = bare_sequences(members)
    found = rank.logprobs(sequences)
    return [found[index][sequence.policy_mask] for index, sequence in enumerate(sequences)]


def preference(rank: Any, groups: list[list[Trajectory]]) -> float:
    """Mean log-probability a token of right trajectories minus that of wrong ones."""
    members = [member for group in groups for member in group]
    means = [float(logps.mean()) for logps in logprobs(rank, members)]
    right = [mean for mean, member in zip(means, members, strict=True) if member.reward > 0]
    wrong = [mean for mean, member in zip(means, members, strict=True) if member.reward == 0]
    return float(np.mean(right) - np.mean(wrong))


def without_void_turns(how: str, hints: AnswerHints, model_dir: Path, port: int) -> dict[str, Any]:
    """One batch in which nobody answers: every last turn is void."""
    config = presets.load("quickstart-cpu", [*SETTINGS, "learner.updates_per_batch=1", f"algorithm.void_turns={how}"])
    made = rank_of(config, model_dir, port)
    groups = groups_of(hints, made)
    for group in groups:
        for member in group:
            member.answer, member.outcome = None, Outcome.NO_ANSWER
    members = [member for group in groups for member in group]
    before = logprobs(made, members)
    parts = Parts(config, None, False, None, OneRank(made), None, None, hints)
    metrics = asyncio.run(learn(parts, groups))
    moved = max(float(abs(a - b).max()) for a, b in zip(logprobs(made, members), before, strict=True))
    return {"metrics": metrics, "moved": moved}


def every_recipe(rank: int, world: int, port: int, folder: Path, model_dir: Path) -> None:
    found: dict[str, Any] = {}
    hints = None
    for name in recipes.names():
        config = presets.load("quickstart-cpu", [*SETTINGS, f"recipe={name}", f"runs_dir={folder}"])
        hints = hints or AnswerHints.of(config, model_dir)
        torch.manual_seed(0)
        made = rank_of(config, model_dir, port)
        groups = groups_of(hints, made)
        before = preference(made, groups)
        parts = Parts(config, None, False, None, OneRank(made), None, None, hints)
        batches = [asyncio.run(learn(parts, groups)) for _ in range(BATCHES)]
        found[name] = {"before": before, "after": preference(made, groups), "metrics": batches}
    found["void turns"] = {how: without_void_turns(how, hints, model_dir, port) for how in ("mask", "drop_trajectory")}
    (folder / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model_dir, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("recipes")
    write_tiny_model(model_dir, 0)
    finish(run_ranks(every_recipe, 1, folder, model_dir), folder)
    told: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return told


@pytest.mark.parametrize("recipe", recipes.names())
def test_a_recipe_trains_towards_what_was_rewarded(found: dict[str, Any], recipe: str) -> None:
    told = found[recipe]
    for metrics in told["metrics"]:
        assert all(np.isfinite(value) for value in metrics.values()), metrics
        assert metrics["skipped_steps"] == 0 and metrics["grad/norm"] > 0
    assert told["after"] > told["before"] + 1e-3, (told["before"], told["after"])


def test_each_method_leaves_its_mark(found: dict[str, Any]) -> None:
    last = {name: found[name]["metrics"][-1] for name in recipes.names()}
    assert last["grpo"]["ratio/max"] == pytest.approx(1, abs=1e-5), "one update a batch"
    assert last["ctpo"]["ratio/max"] > 1.001 and last["gspo"]["ratio/clip_fraction"] > 0
    assert last["llds"]["loss/llds"] > 0 and last["on-device"]["loss/llds"] > 0
    assert last["grpo"]["kl/mean"] > 0 and last["on-device"]["kl/mean"] > 0 and "kl/mean" not in last["dapo"]
    assert any(name.startswith("critic/") for name in last["steppo"]), sorted(last["steppo"])
    assert [last[name]["optimizer_steps"] for name in ("grpo", "llds", "gspo", "dapo")] == [3, 6, 12, 48]


def test_what_is_out_of_the_loss_trains_nothing(found: dict[str, Any]) -> None:
    masked, dropped = (found["void turns"][how] for how in ("mask", "drop_trajectory"))
    assert masked["moved"] > 1e-3 and masked["metrics"]["grad/norm"] > 0, "the calls are trained"
    assert dropped["moved"] == 0 and dropped["metrics"]["grad/norm"] == 0, "every trajectory holds a void turn"
    assert dropped["metrics"]["skipped_steps"] == 0 and dropped["metrics"]["loss/policy"] == 0
    assert dropped["metrics"]["tokens/policy"] == masked["metrics"]["tokens/policy"]
