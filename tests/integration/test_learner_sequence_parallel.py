"""Real DeepSpeed ranks that share a packed row compute what one rank with the whole row computes: log-probabilities, values,
metrics, gradients and weights after three steps, in every ZeRO stage, with shared prefixes; and each holds its share of the
activations."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.requirements import need

need("deepspeed", "torch", "transformers")

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.sequence import TrainSequence, ValueTargets
from learner.settings import RankSettings
from tests.integration.learner_ranks import finish, run_ranks
from tests.integration.test_learner_exact import gradients, weights
from tests.integration.test_learner_shared import families
from toolrl.app.tiny_model import write_tiny_model
from toolrl.config import AlgorithmConfig, CriticConfig, LearnerConfig, Named

pytestmark = pytest.mark.deepspeed

CTPO = AlgorithmConfig(policy_loss=Named("ctpo"))
TOKEN = AlgorithmConfig(
    policy_loss=Named("token"),
    regularizers=[Named("llds", {"weight": 0.2}), Named("kl", {"weight": 0.1}), Named("entropy", {"weight": 0.01})],
)


@dataclass(frozen=True)
class Case:
    """A learner; what it must agree with has the same `base` and one rank."""

    base: str
    size: int = 1  # ranks that share a row
    learner: dict[str, Any] = field(default_factory=dict)


ALGORITHMS = {"ctpo": CTPO, "token": TOKEN, "shared": TOKEN, "own": TOKEN}
CRITICS = {
    "shared": CriticConfig("shared", backbone_gradient=True, learning_rate=1e-3),
    "own": CriticConfig("own", learning_rate=1e-3),
}
RECOMPUTED = {"zero_stage": 3, "gradient_checkpointing": True, "logprob_chunk_tokens": 16}
SPLIT = {"zero_stage": 3, "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
CASES: dict[int, dict[str, Case]] = {  # by the number of ranks
    1: {name: Case(name) for name in ALGORITHMS},
    2: {
        "ctpo_0": Case("ctpo", 2),
        "ctpo_1": Case("ctpo", 2, {"zero_stage": 1}),
        "ctpo_2": Case("ctpo", 2, {"zero_stage": 2}),
        "ctpo_3": Case("ctpo", 2, RECOMPUTED),
        "token_0": Case("token", 2, {"tokens_per_micro_batch": 150}),
        "token_3": Case("token", 2, SPLIT),
        "shared_0": Case("shared", 2),
        "own_0": Case("own", 2),
    },
    4: {
        "pairs": Case("token", 2, {"tokens_per_micro_batch": 300}),
        "quartet": Case("ctpo", 4, {"zero_stage": 3}),  # of 4 heads each rank has one, of 2 key and value heads too
    },
}


def batch_of(base: str) -> list[TrainSequence]:
    """Twelve sequences of three groups with shared prompts and histories; for a critic with targets."""
    draw = np.random.default_rng(1)
    made = families()
    for each in made:
        turns = len(set(each.turn_ids[each.policy_mask].tolist()))
        old, towards = (draw.normal(size=turns).astype(np.float32) for _ in range(2))
        each.value_targets = ValueTargets(old, towards) if base in CRITICS else None
    return made


def start(case: Case, model_dir: Path, rank: int, world: int, port: int) -> Any:
    from learner.rank import LearnerRank

    config = LearnerConfig(
        learning_rate=1e-3,
        gradient_clip=0.5,
        updates_per_batch=1,
        share_prefixes="on",
        sequence_parallel=case.size,
        **case.learner,
    )
    wanted = RankSettings(
        str(model_dir), config, ALGORITHMS[case.base], critic=CRITICS.get(case.base, CriticConfig()), dtype="float32"
    )
    return LearnerRank(wanted, rank=rank, world=world, port=port)


def run_case(case: Case, model_dir: Path, rank: int, world: int, port: int) -> dict[str, Any]:
    """One step, of which the gradient is seen, and two more on one batch, so that ratios are not 1."""
    made, sequences = start(case, model_dir, rank, world, port), batch_of(case.base)
    found: dict[str, Any] = {
        "statistics": made.token_statistics(sequences),
        "values": made.values(sequences) if case.base in CRITICS else {},
        "attention": made.attention_mass(sequences, [[[(0, 2)], [(1, 3), (4, 5)]]] * len(sequences), layer=-1),
        "saved_bytes": saved_bytes(made, sequences),
        "metrics": [made.train_batch(sequences)],
        "gradients": gradients(made),
    }
    made.settings.learner.updates_per_batch = 2
    found["metrics"].append(made.train_batch(sequences))
    assert made.steps.taken == 3
    found["weights"] = weights(made)
    if made.critic is not None:
        found["weights"] |= {f"critic.{name}": weight.detach() for name, weight in made.critic.masters.items()}
    return found


def saved_bytes(made: Any, sequences: list[TrainSequence]) -> int:
    """What autograd keeps for the backward pass of the batch as one row, weights aside; each storage once."""
    kept: dict[int, torch.UntypedStorage] = {}
    weights_at = {parameter.untyped_storage().data_ptr() for parameter in made.models.policy.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights_at:
            kept[storage.data_ptr()] = storage
        return tensor

    (micro, *_) = made.micro_batches.of(sequences)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made.engine(micro.batch)
    return sum(storage.nbytes() for storage in kept.values())


def every_case(rank: int, world: int, port: int, folder: Path, model_dir: Path) -> None:
    for name, case in CASES[world].items():
        torch.save(run_case(case, model_dir, rank, world, port), folder / f"{world}_{name}_{rank}.pt")
    if world == 2:
        refusals(model_dir, rank, world, port)


def refusals(model_dir: Path, rank: int, world: int, port: int) -> None:
    with pytest.raises(ValueError, match=r"sequence_parallel=3 does not divide learner\.ranks=2"):
        start(Case("ctpo", 3), model_dir, rank, world, port)
    with pytest.raises(ValueError, match="sequence_parallel=2 must divide the model's 3 attention heads; one of 1, 3"):
        start(Case("ctpo", 2), model_dir / "three_heads", rank, world, port)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[Any, Any]:
    """(ranks, case) -> what each rank found."""
    model_dir, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("ranks")
    write_tiny_model(model_dir, 0)
    three = Qwen3Config.from_pretrained(model_dir, num_attention_heads=3, num_key_value_heads=3)
    Qwen3ForCausalLM(three).save_pretrained(model_dir / "three_heads")
    finish([process for world in CASES for process in run_ranks(every_case, world, folder, model_dir)], folder)
    return {"model": model_dir} | {
        (world, name): [torch.load(folder / f"{world}_{name}_{rank}.pt", weights_only=False) for rank in range(world)]
        for world, cases in CASES.items()
        for name in cases
    }


SPREAD = [(world, name) for world in (2, 4) for name in CASES[world]]


@pytest.mark.parametrize(("world", "name"), SPREAD)
def test_ranks_that_share_a_row_compute_what_one_rank_does(results, world, name):
    case = CASES[world][name]
    (expected,) = results[1, case.base]
    for what in ("statistics", "values", "attention"):
        read = {index: array for found in results[world, name] for index, array in found[what].items()}
        assert read.keys() == expected[what].keys()
        for index, array in read.items():
            np.testing.assert_allclose(array, expected[what][index], atol=1e-5)
    for found in results[world, name]:
        for parameter, gradient in expected["gradients"].items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(found["gradients"][parameter], gradient, atol=2e-5 * scale, rtol=1e-3)
        for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
            assert ours.keys() == theirs.keys()
            for metric in (name for name in ours if not name.startswith("time/")):
                assert ours[metric] == pytest.approx(theirs[metric], rel=2e-4, abs=1e-5), metric


@pytest.mark.parametrize(("world", "name"), SPREAD)
def test_three_steps_end_at_the_same_weights_on_every_rank(results, world, name):
    """As far as float32 goes: Adam's first steps turn what rounding left of a gradient that cancels into whole steps."""
    (expected,) = results[1, CASES[world][name].base]
    start = load_file(results["model"] / "model.safetensors")
    moved = distance(expected["weights"], start)
    first, *others = (found["weights"] for found in results[world, name])
    assert moved > 0.01 and distance(first, expected["weights"]) < 1e-4 * moved
    assert all(torch.equal(other[weight], first[weight]) for other in others for weight in first)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return float(sum((one[name].double() - other[name].double()).square().sum() for name in other)) ** 0.5


def test_each_rank_keeps_its_share_of_the_activations(results):
    (whole,) = results[1, "ctpo"]
    for world, name in ((2, "ctpo_0"), (4, "quartet")):
        for found in results[world, name]:
            assert found["saved_bytes"] < 1.1 * whole["saved_bytes"] / world
