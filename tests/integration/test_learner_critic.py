"""The critic on real DeepSpeed ranks: values where they belong, one result for any number of ranks, resume to the bit; then
steppo, lambda_return, gear and KL in the reward through the loop's own `learn` on a real learner group.

Each process of `run_ranks` does all its cases in one go, because importing the libraries costs more than the cases.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.requirements import need

need("ray", "deepspeed", "torch", "transformers")

import ray
import torch

from actors.learner_group import LearnerGroup
from learner.sequence import TrainSequence, ValueTargets
from learner.settings import RankSettings
from learner.turns import bare_sequences
from tests.integration.learner_ranks import finish, run_ranks
from tests.unit.learner_fixtures import random_sequences
from tests.unit.test_learner_critic import BATCH, READ_AT
from toolrl import presets
from toolrl.algorithms.advantages import grpo
from toolrl.algorithms.batch_advantages import batch_advantages
from toolrl.app.answer_hints import AnswerHints
from toolrl.app.evidence import charge_kl, gather_evidence
from toolrl.app.parts import Parts
from toolrl.app.tiny_model import write_tiny_model
from toolrl.app.train import learn
from toolrl.config import AlgorithmConfig, CriticConfig, LearnerConfig, Named, RunConfig
from toolrl.trajectory import Outcome, Trajectory, Turn

SHARED = CriticConfig(kind="shared", learning_rate=1e-2, gradient_clip=1e9)
KINDS = {
    "shared": SHARED,
    "joined": replace(SHARED, backbone_gradient=True, loss_weight=0.5),
    "own": replace(SHARED, kind="own", learning_rate=1e-3),
}
STAGES = {"shared": (3,), "joined": (0, 2), "own": (3,)}  # on two ranks
RESUMED = ((1, "own", 0), (2, "joined", 2), (2, "shared", 3))
TABLE = np.asarray([0.0, 1.0, -0.5, 0.3, 0.8, -1.0, 0.1, 0.6], dtype=np.float32)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, 0)
    return folder


def settings(model_dir: Path, critic: CriticConfig, **learner: Any) -> RankSettings:
    config = LearnerConfig(**({"learning_rate": 1e-3, "gradient_clip": 0.0, "updates_per_batch": 2} | learner))
    return RankSettings(str(model_dir), config, AlgorithmConfig(), critic=critic)


def planted(count: int, seed: int) -> list[TrainSequence]:
    """Sequences of 8 different tokens; a turn's return is a table's entry for the token before it."""
    sequences = random_sequences(count, seed=seed)
    for sequence in sequences:
        sequence.token_ids %= 8
        turns = np.where(sequence.policy_mask, sequence.turn_ids, -1)
        starts = [int(np.flatnonzero(turns == turn)[0]) for turn in np.unique(turns[turns >= 0])]
        read = sequence.token_ids[[sequence.prompt_length + start - 1 for start in starts]]
        sequence.value_targets = ValueTargets(np.zeros(len(starts), dtype=np.float32), TABLE[read])
    return sequences


def with_values(made: Any, sequences: list[TrainSequence]) -> list[TrainSequence]:
    """The same with the critic's own old values (all of them on every rank)."""
    found = [made.values(sequences)]
    if made.world > 1:
        found = [None] * made.world
        torch.distributed.all_gather_object(found, made.values(sequences))
    values = {index: array for share in found for index, array in share.items()}
    return [replace(s, value_targets=ValueTargets(values[i], s.value_targets.returns)) for i, s in enumerate(sequences)]


def all_cases(rank: int, world: int, port: int, folder: Path, model_dir: Path) -> None:
    from learner.rank import LearnerRank

    def make(critic: CriticConfig, **learner: Any) -> Any:
        return LearnerRank(settings(model_dir, critic, **learner), rank=rank, world=world, port=port)

    for name, critic in KINDS.items():
        for stage in STAGES[name] if world > 1 else (0,):
            made = make(critic, zero_stage=stage, tokens_per_micro_batch=100 if stage == 2 else 8192)
            torch.nn.init.constant_(made.critic.head.weight, 0.05)
            sequences = with_values(made, planted(8, seed=1))
            metrics = [made.train_batch(sequences) for _ in range(2)]
            result = {
                "metrics": metrics,
                "critic": {key: value.clone() for key, value in made.critic.state()["weights"].items()},
                "policy": {key: value.clone() for key, value in made.weight_source()},
            }
            if rank == 0:
                torch.save(result, folder / f"{name}_{world}_{stage}.pt")
            if (world, name, stage) in RESUMED:
                resume_is_exact(made, make, sequences, folder / f"checkpoint_{name}_{world}_{stage}", stage)
    if world == 1:
        for name in ("shared", "own"):
            half = replace(settings(model_dir, KINDS[name]), dtype="bfloat16")
            in_sixteen_bits(LearnerRank(half, port=port), folder / f"half_{name}")
        values_are_those_of_separate_rows(make, model_dir)
        planted_values_are_learnt(make)
        the_policy_is_left_alone(make)
        a_copy_follows_the_policy(make)


def critic_of(made: Any) -> dict[str, torch.Tensor]:
    state = made.critic.state()
    moments = {f"{i}.{k}": v for i, s in state["optimizer"]["state"].items() for k, v in s.items()}
    return {key: torch.as_tensor(value).clone() for key, value in (state["weights"] | moments).items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def resume_is_exact(made: Any, make: Any, sequences: list[Any], folder: Path, stage: int) -> None:
    """Save, train on, load: all as it was, training goes on as it would have, and saving again writes the same."""
    made.save_checkpoint(folder)
    saved = critic_of(made)
    one = made.train_batch(sequences)
    moved = critic_of(made)
    assert not equal(saved, moved)
    for again in (made, make(made.settings.critic, zero_stage=stage)):
        again.load_checkpoint(folder)
        assert equal(critic_of(again), saved)
        metrics = again.train_batch(sequences)
        assert equal(critic_of(again), moved)
        assert {k: v for k, v in metrics.items() if "time" not in k} == {
            k: v for k, v in one.items() if "time" not in k
        }
    made.load_checkpoint(folder)
    twice = folder.with_name(folder.name + "_twice")
    made.save_checkpoint(twice)
    if made.rank == 0:
        first, second = (torch.load(place / "critic.pt") for place in (folder, twice))
        assert equal(first["weights"], second["weights"]) and str(first["optimizer"]) == str(second["optimizer"])


def in_sixteen_bits(made: Any, folder: Path) -> None:
    """The critic learns, keeps float32 weights for its optimiser, and comes back as it was."""
    sequences = planted(8, seed=1)
    losses = [made.train_batch(with_values(made, sequences))["critic/value_loss"] for _ in range(4)]
    assert losses[-1] < 0.9 * losses[0]
    kept = made.critic.weights["backbone.norm.weight"] if made.critic.backbone is not None else made.critic.head.weight
    assert kept.dtype == (torch.bfloat16 if made.critic.backbone is not None else torch.float32)
    made.save_checkpoint(folder)
    saved, values = critic_of(made), made.values(sequences)
    made.train_batch(sequences)
    made.load_checkpoint(folder)
    assert equal(critic_of(made), saved)
    assert all((array == values[index]).all() for index, array in made.values(sequences).items())


def values_are_those_of_separate_rows(make: Any, model_dir: Path) -> None:
    """Hand-made turns: after the prompt, an empty tool turn, a tool turn, a fresh context; against the model's own pass."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    sequences = bare_sequences(BATCH)
    for critic in (KINDS["shared"], KINDS["own"]):
        made = make(critic)
        torch.nn.init.normal_(made.critic.head.weight)
        found = made.values(sequences)
        for index, (sequence, tokens) in enumerate(zip(sequences, READ_AT, strict=True)):
            ids = sequence.token_ids.tolist()
            places = [ids.index(token) for token in tokens]
            with torch.no_grad():
                states = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, places]
                expected = made.critic.head(states).squeeze(1).numpy()
            np.testing.assert_allclose(found[index], expected, atol=1e-5)
            assert len({round(float(value), 3) for value in found[index]}) == len(tokens)


def planted_values_are_learnt(make: Any) -> None:
    """In a warm-up, by either kind, from nothing explained to nearly all; the policy then starts to move."""
    for kind, steps in (("shared", 30), ("own", 16)):
        critic = replace(KINDS[kind], warmup_steps=steps, value_clip=None)
        made = make(critic, updates_per_batch=1)
        before = made.checksums()
        explained = []
        for step in range(steps):
            metrics = made.train_batch(with_values(made, planted(16, seed=step)))
            explained.append(metrics["critic/explained_variance"])
            assert metrics["optimizer_steps"] == 0 and metrics["lr"] == 0
        assert explained[0] < 0.1 and np.mean(explained[-5:]) > 0.7, (kind, explained)
        assert made.checksums() == before
        assert made.train_batch(with_values(made, planted(16, seed=0)))["optimizer_steps"] == 1
        assert made.checksums() != before


def the_policy_is_left_alone(make: Any) -> None:
    """A detached head and a critic of its own change no bit of the policy; a head with a gradient does."""
    ends = {}
    for name, critic in {"none": CriticConfig(), **KINDS}.items():
        made = make(critic)
        if made.critic is not None:
            torch.nn.init.constant_(made.critic.head.weight, 0.05)
        for _ in range(2):
            made.train_batch(planted(8, seed=1))
        ends[name] = made.checksums()
    assert ends["none"] == ends["shared"] == ends["own"] != ends["joined"]


def a_copy_follows_the_policy(make: Any) -> None:
    """After a supervised start the critic begins as the policy that it left."""
    made = make(KINDS["own"])
    made.supervised_batch(planted(8, seed=1), 1e-2)
    made.reset_optimizer()
    made.freeze_reference()
    backbone = {name.removeprefix("backbone."): w for name, w in made.critic.weights.items() if "backbone" in name}
    policy = {name.removeprefix("model."): w for name, w in made.weight_source()}
    assert all(torch.equal(policy[name], weight) for name, weight in backbone.items()) and backbone


@pytest.fixture(scope="module")
def results(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    processes = [process for world in (1, 2) for process in run_ranks(all_cases, world, folder, model_dir)]
    finish(processes, folder)
    return folder


def test_two_ranks_and_every_stage_train_the_critic_of_one(results):
    for name in KINDS:
        one = torch.load(results / f"{name}_1_0.pt", weights_only=False)
        for stage in STAGES[name]:
            two = torch.load(results / f"{name}_2_{stage}.pt", weights_only=False)
            for part, bound in (("critic", 1e-5), ("policy", 1e-4)):
                for weight, expected in one[part].items():
                    torch.testing.assert_close(
                        two[part][weight], expected, atol=bound, rtol=1e-3, msg=f"{name} ZeRO-{stage}: {weight}"
                    )
            for ours, theirs in zip(two["metrics"], one["metrics"], strict=True):
                for metric in ("value_loss", "clip_fraction", "explained_variance", "grad_norm", "skipped_steps"):
                    assert ours[f"critic/{metric}"] == pytest.approx(theirs[f"critic/{metric}"], rel=1e-3, abs=1e-5)


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", include_dashboard=False, num_cpus=4, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RunConfig:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"prompt": "What is 2 + 3?", "reward_model": {"ground_truth": "5"}},
        {"prompt": "Sort it out.", "reward_model": {"ground_truth": {"program": "no text to tell"}}},
    ]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    overrides = [
        f"runs_dir={folder}",
        "tasks={kind: rows, families: [], held_out_tasks: 0, shuffle: false}",
        f"tasks.path={folder / 'rows.jsonl'}",
        "tasks.verifier=tests.integration.own_verifiers:shout",
        "learner.updates_per_batch=2",
        "algorithm={advantage: steppo, policy_loss: steppo}",
        "algorithm.regularizers=[{name: kl, options: {weight: 0.1, place: reward}}]",
        "critic={kind: shared, learning_rate: 1e-2}",
    ]
    return presets.load("quickstart-cpu", overrides)


def groups_on(hints: AnswerHints) -> list[list[Trajectory]]:
    """Two groups of three on the two tasks, of random tokens: two turns, one of them after an empty tool turn."""
    generator = np.random.default_rng(0)

    def sampled(count: int) -> Turn:
        return Turn("policy", generator.integers(0, 300, count).tolist(), [-5.0] * count, [0] * count)

    groups = []
    for index in range(2):
        task = hints.tasks.task(index)
        group = f"g{index:06d}"
        prompt = hints.chat.prompt_ids(task.messages)
        groups.append(
            [
                Trajectory(
                    f"{group}.{sample}",
                    group,
                    task.id,
                    sample,
                    prompt,
                    [sampled(5), Turn("tool", [7, 8][: 2 * (sample % 2)]), sampled(4)],
                    outcome=Outcome.ANSWERED,
                    rewards={"outcome": float(sample == 0)},
                )
                for sample in range(3)
            ]
        )
    return groups


async def test_steppo_lambda_return_and_kl_in_the_reward_train_through_the_loop(cluster, model_dir, config):
    group = await LearnerGroup.start(config, str(model_dir))
    hints = AnswerHints.of(config, model_dir)
    parts = Parts(config, None, False, None, group, None, None)
    groups = groups_on(hints)
    members = [member for each in groups for member in each]
    explained = []
    for advantage in ("steppo", "lambda_return") * 3:
        config.algorithm.advantage = Named(advantage)
        before = await group.checksums()
        metrics = await learn(parts, groups)
        assert await group.checksums() != before
        assert all(np.isfinite(value) for value in metrics.values()) and metrics["skipped_steps"] == 0
        assert metrics["critic/grad_norm"] > 0 and metrics["critic/value_loss"] > 0
        explained.append(metrics["critic/explained_variance"])
    assert explained[0] == pytest.approx(0, abs=1e-6) and explained[-1] > explained[0]
    # The reference is where the run began: what the reward is charged is β times the k3 estimate of each turn.
    await charge_kl(group, config.algorithm, members)
    sequences = bare_sequences(members)
    ours, theirs = await group.logprobs(sequences), await group.reference_logprobs(sequences)
    for member, mine, other in zip(members, ours, theirs, strict=True):
        gap = (mine - other).astype(np.float64)
        tokens = np.exp(-gap) - 1 + gap
        expected = [-0.1 * tokens[:5].sum(), -0.1 * tokens[-4:].sum()]
        assert [turn.rewards["kl"] for turn in member.policy_turns] == pytest.approx(expected, rel=1e-2, abs=1e-7)
        assert all(value < 0 for value in expected)
    await group.stop()


async def test_gear_asks_a_teacher_that_knows_the_answer(cluster, model_dir, config):
    from transformers import AutoModelForCausalLM

    algorithm = AlgorithmConfig(advantage=Named("gear"), policy_loss=Named("token"))
    config = replace(config, algorithm=algorithm, critic=CriticConfig())
    group = await LearnerGroup.start(config, str(model_dir))
    hints = AnswerHints.of(config, model_dir)
    groups = groups_on(hints)
    members = [member for each in groups for member in each]
    evidence = await gather_evidence(group, "gear", members, hints)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    question = hints.tasks.task(0).messages
    told = question[-1]["content"] + "\n\nHint: the correct answer is 5."
    prompt = hints.chat.prompt_ids([*question[:-1], {"role": "user", "content": told}])
    member = members[1]
    for column, ids in ((0, prompt + member.response_ids), (1, member.token_ids)):
        with torch.no_grad():
            logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        first = len(ids) - len(member.response_ids)
        expected = [
            float(logp[first + place - 1, ids[first + place]])
            for place, acted in enumerate(member.policy_mask())
            if acted
        ]
        assert [triple[column] for triple in evidence[1]] == pytest.approx(expected, abs=1e-4)
    gaps = [max(abs(triple[0] - triple[1]) for triple in row) for row in evidence]
    assert min(gaps[:3]) > 0.01 and max(gaps[3:]) == 0.0  # no answer, no teacher
    found = batch_advantages("gear", groups, evidence=evidence)
    plain = grpo([1.0, 0.0, 0.0]) * 2
    assert found.per_token and found.targets is None
    for row, advantage in zip(found.advantages, plain, strict=True):
        assert len(row) == 9 and sum(row) == pytest.approx(9 * advantage)
    assert all(row == pytest.approx([a] * 9) for row, a in zip(found.advantages[3:], plain[3:], strict=True))
    assert any(value != pytest.approx(plain[0]) for value in found.advantages[0])
    metrics = await learn(Parts(config, None, False, None, group, None, None, hints), groups)
    assert metrics["skipped_steps"] == 0 and metrics["optimizer_steps"] == 2
    await group.stop()
