"""Real DeepSpeed ranks over gloo: the result does not depend on ranks, micro-batches or the ZeRO stage; checkpoints are exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.requirements import need

need("deepspeed", "torch", "transformers")

import numpy as np
import torch
from safetensors import safe_open

from learner.settings import RankSettings
from tests.integration.learner_controls import controls_are_as_exact_as_settings, going_back_keeps_the_clock
from tests.integration.learner_monitoring import check_monitors, monitors_of_one_batch
from tests.integration.learner_ranks import finish, run_ranks
from tests.integration.learner_turns import making_room_changes_nothing
from tests.unit.learner_fixtures import random_sequences
from toolrl.app.tiny_model import write_tiny_model
from toolrl.config import AlgorithmConfig, LearnerConfig, Named

STAGES = (0, 1, 2, 3)
SEQUENCES = 8
VARIANTS: dict[str, dict[str, Any]] = {
    "recomputed": {"zero_stage": 3, "gradient_checkpointing": True, "logprob_chunk_tokens": 16},
    "offloaded": {"zero_stage": 2, "offload": True, "tokens_per_micro_batch": 100},
    "all_offloaded": {
        "zero_stage": 3,
        "offload": True,
        "deepspeed": {
            "zero_optimization": {"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
        },
    },
}
ALGORITHM = AlgorithmConfig(regularizers=[Named("llds", {"weight": 0.2})])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, 0)
    return folder


def settings(model_dir: Path, **learner: Any) -> RankSettings:
    config = LearnerConfig(**({"learning_rate": 1e-3, "gradient_clip": 0.0, "updates_per_batch": 1} | learner))
    return RankSettings(str(model_dir), config, ALGORITHM)


def gradients(rank: Any) -> dict[str, torch.Tensor]:
    """The gradient of the first step: Adam's first moment is 0.1 times it."""
    from deepspeed.utils import safe_get_full_optimizer_state

    found = {}
    for name, parameter in rank.models.policy.causal_lm.named_parameters():
        moment = (
            rank.engine.base_optimizer.state[parameter]["exp_avg"]
            if rank.settings.learner.zero_stage == 0
            else safe_get_full_optimizer_state(parameter, "exp_avg")
        )
        found[name] = moment.clone() / 0.1
    return found


def weights(rank: Any) -> dict[str, torch.Tensor]:
    source = rank.weight_source()
    found = {name: tensor.clone() for name, tensor in source}
    assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()
    ]
    return found


def all_cases(rank: int, world: int, port: int, folder: Path, model_dir: Path) -> None:
    from learner.rank import LearnerRank

    sequences = random_sequences(SEQUENCES, seed=3)
    stages = STAGES if world > 1 else (0,)
    cases: dict[str, dict[str, Any]] = {
        f"{stage}_{cap}": {"zero_stage": stage, "tokens_per_micro_batch": cap}
        for stage in stages
        for cap in (100_000, 100)
    }
    if world > 1:
        cases |= VARIANTS
    for name, options in cases.items():
        made = LearnerRank(settings(model_dir, **options), rank=rank, world=world, port=port)
        metrics = made.train_batch(sequences)
        result = {"metrics": metrics, "gradients": gradients(made), "plan": made.micro_batches.plan(sequences)}
        if rank == 0:
            torch.save(result, folder / f"grad_{world}_{name}.pt")
        if name.endswith("_100"):
            checkpoint_round_trip(made, folder / f"checkpoint_{world}_{options['zero_stage']}", sequences)
    for dtype, stage in (("bfloat16", 0), ("bfloat16", 3)) if world > 1 else (("bfloat16", 0),):
        half = LearnerRank(
            RankSettings(str(model_dir), LearnerConfig(zero_stage=stage, learning_rate=1e-3), ALGORITHM, dtype=dtype),
            rank=rank,
            world=world,
            port=port,
        )
        metrics = half.train_batch(sequences)
        assert metrics["skipped_steps"] == 0 and 0 < metrics["grad/norm"] < 10
        assert {tensor.dtype for _, tensor in half.weight_source()} == {torch.bfloat16}
        before, sick = half.checksums(), random_sequences(SEQUENCES, seed=3)
        for sequence in sick:
            sequence.advantages[sequence.policy_mask] = float("inf")
        metrics = half.train_batch(sick)
        assert metrics["skipped_steps"] == 4 and metrics["alarm/nonfinite"] == 1 and half.checksums() == before
    non_finite_is_skipped(LearnerRank, rank, world, port, model_dir)
    nothing_in_the_loss_moves_nothing(LearnerRank, rank, world, port, model_dir)
    several_updates(LearnerRank, rank, world, port, model_dir)
    forgetting(LearnerRank, rank, world, port, model_dir)
    reference_follows(LearnerRank, rank, world, port, model_dir, folder)
    controls_are_as_exact_as_settings(LearnerRank, rank, world, port, model_dir)
    going_back_keeps_the_clock(LearnerRank, rank, world, port, model_dir, folder)
    monitors_of_one_batch(LearnerRank, rank, world, port, model_dir, folder)
    making_room_changes_nothing(LearnerRank, rank, world, port, model_dir, folder)


def reference_follows(rank_class: Any, rank: int, world: int, port: int, model_dir: Path, folder: Path) -> None:
    """KL is to the policy that was frozen, also after a checkpoint went to a new learner."""
    sequences = random_sequences(SEQUENCES, seed=3)
    algorithm = AlgorithmConfig(regularizers=[Named("kl", {"weight": 0.1})])
    config = LearnerConfig(learning_rate=0.0, updates_per_batch=1, zero_stage=3 if world > 1 else 0)
    wanted = RankSettings(str(model_dir), config, algorithm)
    made = rank_class(wanted, rank=rank, world=world, port=port)
    made.supervised_batch(sequences, 1e-2)
    assert made.train_batch(sequences)["kl/mean"] > 0
    made.freeze_reference()
    assert made.train_batch(sequences)["kl/mean"] == 0.0
    made.save_checkpoint(folder / f"reference_{world}")
    later = rank_class(wanted, rank=rank, world=world, port=port)
    later.load_checkpoint(folder / f"reference_{world}")
    assert later.train_batch(sequences)["kl/mean"] == 0.0


def forgetting(rank_class: Any, rank: int, world: int, port: int, model_dir: Path) -> None:
    """After `reset_optimizer` a step is that of a fresh optimiser: its moments hold the new gradient only."""
    sequences = random_sequences(SEQUENCES, seed=3)
    made = rank_class(settings(model_dir, zero_stage=2), rank=rank, world=world, port=port)
    made.supervised_batch(sequences, 0.0)  # moments without movement
    assert made.steps.taken == 0, "a supervised step stands outside the schedule"
    made.reset_optimizer()
    assert made.train_batch(sequences)["optimizer_steps"] == 1
    fresh = rank_class(settings(model_dir, zero_stage=2), rank=rank, world=world, port=port)
    fresh.train_batch(sequences)
    assert made.checksums() == fresh.checksums()


def several_updates(rank_class: Any, rank: int, world: int, port: int, model_dir: Path) -> None:
    """Ratios stay exactly 1 while the weights stand still, and move from the second update on; the seed decides all."""
    sequences = random_sequences(SEQUENCES, seed=3)
    algorithm = AlgorithmConfig(regularizers=[Named("kl", {"weight": 0.1})])

    def train(rate: float) -> tuple[dict[str, float], dict[str, str]]:
        config = LearnerConfig(learning_rate=rate, updates_per_batch=4)
        made = rank_class(RankSettings(str(model_dir), config, algorithm), rank=rank, world=world, port=port)
        return made.train_batch(sequences), made.checksums()

    still, _ = train(0.0)
    assert still["ratio/max"] == 1.0 and still["ratio/clip_fraction"] == 0.0 and still["kl/mean"] == 0.0
    assert still["optimizer_steps"] == 4
    moving, sums = train(1e-2)
    assert moving["ratio/max"] > 1.01 and moving["ratio/clip_fraction"] > 0 and moving["kl/mean"] > 0
    again, same = train(1e-2)  # a new learner
    assert sums == same
    timeless = [{k: v for k, v in found.items() if not k.startswith("time/")} for found in (moving, again)]
    assert timeless[0] == timeless[1]


def checkpoint_round_trip(made: Any, folder: Path, sequences: list[Any]) -> None:
    """Save, train on, load: everything is as it was, and training goes on as it would have."""
    made.save_checkpoint(folder)
    saved, sums = weights(made), made.checksums()
    random_before = torch.rand(3)
    one = made.train_batch(sequences)
    moved = weights(made)
    assert any(not torch.equal(saved[name], moved[name]) for name in saved)
    made.load_checkpoint(folder)
    assert made.checksums() == sums
    assert torch.equal(torch.rand(3), random_before)
    again = made.train_batch(sequences)
    for name in ("loss/policy", "grad/norm", "optimizer_steps", "lr"):
        assert again[name] == one[name], name
    for name, tensor in weights(made).items():
        torch.testing.assert_close(tensor, moved[name], rtol=0, atol=0)
    exported = folder.with_name(folder.name.replace("checkpoint", "export"))
    made.export_hf(exported)
    torch.save(weights(made), exported / "expected.pt") if made.rank == 0 else weights(made)


def non_finite_is_skipped(rank_class: Any, rank: int, world: int, port: int, model_dir: Path) -> None:
    """A NaN on one rank only: no rank steps, the record names the trajectories, the next batch trains."""
    for stage in STAGES if world > 1 else (0,):
        made = rank_class(settings(model_dir, zero_stage=stage, gradient_clip=1.0), rank=rank, world=world, port=port)
        before = made.checksums()
        sick = random_sequences(SEQUENCES, seed=3)
        position = int(sick[5].policy_mask.argmax())
        sick[5].advantages[position] = float("nan")
        metrics = made.train_batch(sick)
        assert metrics["skipped_steps"] == 1 and metrics["alarm/nonfinite"] == 1
        assert metrics["optimizer_steps"] == 0 and made.checksums() == before
        assert made.steps.skipped[0].trajectory_ids and "t5" in made.steps.skipped[0].trajectory_ids
        healthy = made.train_batch(random_sequences(SEQUENCES, seed=3))
        assert healthy["skipped_steps"] == 0 and healthy["optimizer_steps"] == 1
        assert all(torch.isfinite(tensor).all() for tensor in weights(made).values())


def nothing_in_the_loss_moves_nothing(rank_class: Any, rank: int, world: int, port: int, model_dir: Path) -> None:
    """An update of masked tokens only makes no step, though there is momentum; the schedule and the moments stand still."""
    for stage in (0, 2, 3) if world > 1 else (0,):
        wanted = settings(model_dir, zero_stage=stage, updates_per_batch=2, schedule="linear")
        wanted = replace(wanted, total_steps=8)
        made = rank_class(wanted, rank=rank, world=world, port=port)
        sequences = random_sequences(SEQUENCES, seed=3)
        assert made.train_batch(sequences)["empty_updates"] == 0
        before, rate, moments = made.checksums(), made.steps.rate(), gradients(made)
        masked = random_sequences(SEQUENCES, seed=4)
        for sequence in masked:
            sequence.loss_mask = np.zeros_like(sequence.loss_mask)
        metrics = made.train_batch(masked)
        assert metrics["empty_updates"] == 2 and metrics["optimizer_steps"] == 2 and metrics["grad/norm"] == 0
        assert metrics["skipped_steps"] == metrics["alarm/nonfinite"] == 0 and made.skipped_steps() == []
        assert made.supervised_batch(masked)["empty_updates"] == 1
        assert made.checksums() == before and made.steps.rate() == rate
        assert all(torch.equal(moment, moments[name]) for name, moment in gradients(made).items())
        masked[0].loss_mask = masked[0].policy_mask.copy()  # one of the two updates is empty now
        half = made.train_batch(masked)
        assert half["empty_updates"] == 1 and half["optimizer_steps"] == 3 and made.checksums() != before


@pytest.fixture(scope="module")
def results(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    processes = [process for world in (1, 2) for process in run_ranks(all_cases, world, folder, model_dir)]
    finish(processes, folder)
    return folder


def load(results: Path, name: str) -> dict[str, Any]:
    return torch.load(results / name, weights_only=False)


def test_ranks_micro_batches_and_zero_stages_give_one_gradient(results):
    """1 rank × 8, 2 ranks × 4 and several micro-batches, in every ZeRO stage."""
    whole = load(results, "grad_1_0_100000.pt")
    assert len(whole["plan"]) == 1
    others = ["grad_1_0_100.pt"] + [f"grad_2_{stage}_{cap}.pt" for stage in STAGES for cap in (100_000, 100)]
    others += [f"grad_2_{name}.pt" for name in VARIANTS]
    for name in others:
        other = load(results, name)
        assert len(other["plan"]) > 1 or not name.endswith("_100.pt")
        for parameter, expected in whole["gradients"].items():
            found = other["gradients"][parameter]
            scale = float(expected.abs().max())
            torch.testing.assert_close(found, expected, atol=2e-5 * scale, rtol=1e-3, msg=f"{name}: {parameter}")
        for metric in ("loss/policy", "grad/norm", "entropy/mean", "gap/mean", "loss/llds", "tokens/policy"):
            assert other["metrics"][metric] == pytest.approx(whole["metrics"][metric], rel=2e-5, abs=1e-7), metric


def test_the_gradient_is_that_of_the_loss_written_down_by_hand(results, model_dir):
    """Row by row, float32, whole logits; ρ = 1 on a fresh batch, so d loss = −Σ k·A·∇logp / N."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    sequences = random_sequences(SEQUENCES, seed=3)
    count = sum(int(sequence.policy_mask.sum()) for sequence in sequences)
    total = torch.zeros(())
    for sequence in sequences:
        ids = torch.from_numpy(sequence.token_ids)[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, sequence.prompt_length - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, ids[0, sequence.prompt_length :, None]).squeeze(1)
        mask = torch.from_numpy(sequence.policy_mask)
        gap = (logp.detach() - torch.from_numpy(sequence.rollout_logp)).exp().clamp(max=2)
        total = total - (gap * torch.from_numpy(sequence.advantages) * logp)[mask].sum() / count
    total.backward()
    found = load(results, "grad_1_0_100000.pt")["gradients"]
    for name, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(found[name], parameter.grad, atol=2e-5 * scale, rtol=1e-3, msg=name)


def test_exports_of_every_stage_load_with_the_same_weights(results, model_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for world, stage in [(1, 0)] + [(2, stage) for stage in STAGES]:
        folder = results / f"export_{world}_{stage}"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        expected = torch.load(folder / "expected.pt")
        found = dict(model.named_parameters())
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name].detach(), tensor, rtol=0, atol=0)
        assert stored_names(folder) == stored_names(model_dir)  # what vLLM reads
        assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(model_dir).get_vocab()


def stored_names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_a_checkpoint_that_was_never_finished_or_fits_not_is_refused(results, tmp_path):
    from learner.checkpoint import load_checkpoint

    class Stage:
        def zero_optimization_stage(self) -> int:
            return 1

    with pytest.raises(ValueError, match="never finished"):
        load_checkpoint(Stage(), tmp_path, rank=0, world=1)
    with pytest.raises(ValueError, match="world = 2"):
        load_checkpoint(Stage(), results / "checkpoint_2_1", rank=0, world=1)


def test_monitors_do_not_depend_on_ranks_and_are_those_of_float64(results, model_dir):
    check_monitors(results, model_dir)
