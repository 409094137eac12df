"""Adapters and frozen weights with real DeepSpeed ranks: what is published, saved, exported and skipped, in every ZeRO stage."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.requirements import need

need("deepspeed", "torch", "transformers", "accelerate", "peft")

import torch

from learner import lora
from learner.settings import RankSettings
from learner.weight_source import WeightSource, checksum
from tests.integration.learner_ranks import finish, run_ranks
from tests.unit.learner_fixtures import random_sequences
from toolrl.app.tiny_model import write_tiny_model
from toolrl.config import AlgorithmConfig, LearnerConfig, LoraConfig, Named

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]

STAGES = (0, 1, 2, 3)
LORA = LoraConfig(rank=4, alpha=8.0)
ALGORITHM = AlgorithmConfig(regularizers=[Named("kl", {"weight": 0.1})])
SPLIT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(f"model{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        write_tiny_model(folder, seed)
    return folders


def settings(model_dir: Path, stage: int, **changes: Any) -> RankSettings:
    config = LearnerConfig(
        zero_stage=stage, learning_rate=1e-2, updates_per_batch=2, deepspeed=SPLIT if stage == 3 else {}
    )
    return RankSettings(str(model_dir), config, ALGORITHM, **({"lora": LORA} | changes))


def all_cases(rank: int, world: int, port: int, folder: Path, model_dir: Path, other_model: Path) -> None:
    from learner.rank import LearnerRank

    def start(**options: Any) -> LearnerRank:
        return LearnerRank(settings(**options), rank=rank, world=world, port=port)

    for stage in STAGES if world == 2 else (0,):
        place = folder / f"{world}_{stage}"
        made = start(model_dir=model_dir, stage=stage)
        loaded = made.checksums()  # B is 0: the merged weights are those of the folder
        a_batch_without_a_finite_loss_moves_nothing(made)
        metrics = made.train_batch(random_sequences(8, seed=3))
        gone_on = save_move_load_save(made, place)
        made.export_hf(place / "export")
        result = {
            "loaded": loaded,
            "metrics": metrics,
            "sums": made.checksums(),
            "published": published(made),
            "base": WeightSource(made.models.policy.causal_lm, base=True).checksums(),
            "logprobs": made.logprobs(random_sequences(8, seed=5)),
            "gone_on": gone_on,
        }
        torch.save(result, folder / f"result_{world}_{stage}_{rank}.pt")
        if stage in (0, 3):
            refusals(start, model_dir, other_model, stage, place / "first")
    if world == 2:
        a_frozen_weight_stays(start, model_dir)
        bfloat16(start, model_dir)


def published(made: Any) -> tuple[dict[str, torch.Tensor], Any, int]:
    """The adapter alone, for engines that serve it: its tensors, its settings, and the bytes of all weights."""
    made.settings.lora.publish = "adapter"
    source, adapter = made.published()
    tensors = {name: tensor.clone() for name, tensor in source}
    made.settings.lora.publish = "merged"
    assert made.published()[1] is None
    return tensors, adapter, made.weight_source().nbytes()


def a_batch_without_a_finite_loss_moves_nothing(made: Any) -> None:
    before = made.checksums()
    sick = random_sequences(8, seed=3)
    sick[5].advantages[int(sick[5].policy_mask.argmax())] = float("nan")
    metrics = made.train_batch(sick)
    assert metrics["alarm/nonfinite"] == 1 and metrics["skipped_steps"] == 1 and metrics["optimizer_steps"] == 1
    assert "t5" in made.steps.skipped[0].trajectory_ids
    assert made.checksums() != before  # by the other update of the batch, which was sound
    assert all(torch.isfinite(tensor).all() for _, tensor in made.weight_source())


def save_move_load_save(made: Any, place: Path) -> dict[str, str]:
    """Save, train on, load: as it was, the frozen reference too; training goes on as it would have. Saved again: equal."""
    sequences = random_sequences(8, seed=4)
    made.freeze_reference()
    made.save_checkpoint(place / "first")
    sums = made.checksums()
    one = made.train_batch(sequences)
    moved = made.checksums()
    assert moved != sums and one["kl/mean"] > 0
    made.freeze_reference()  # another reference, which loading must undo
    made.load_checkpoint(place / "first")
    assert made.checksums() == sums
    made.save_checkpoint(place / "second")
    again = made.train_batch(sequences)
    assert made.checksums() == moved
    assert {name: again[name] for name in ("loss/policy", "kl/mean", "grad/norm")} == {
        name: one[name] for name in ("loss/policy", "kl/mean", "grad/norm")
    }
    return moved


def refusals(start: Any, model_dir: Path, other_model: Path, stage: int, checkpoint: Path) -> None:
    for options, why in (
        ({"model_dir": other_model}, "adapter of another model"),
        ({"lora": dataclasses.replace(LORA, rank=2)}, "other rank"),
        ({"lora": LoraConfig()}, "saved with an adapter"),
    ):
        with pytest.raises(ValueError, match=why):
            start(**({"model_dir": model_dir, "stage": stage} | options)).load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="dropout"):
        start(model_dir=model_dir, stage=stage, lora=dataclasses.replace(LORA, dropout=0.1))


def a_frozen_weight_stays(start: Any, model_dir: Path) -> None:
    for stage in (0, 1, 3):
        made = start(model_dir=model_dir, stage=stage, lora=LoraConfig(), frozen=["model.embed_tokens.*", "*.1.mlp.*"])
        before = made.checksums()
        made.train_batch(random_sequences(8, seed=3))
        after = made.checksums()
        same = {name for name in after if after[name] == before[name]}
        assert same == {name for name in after if "embed_tokens" in name or ".1.mlp." in name}
    with pytest.raises(ValueError, match="no weight is called 'lm_hed'"):
        start(model_dir=model_dir, stage=0, lora=LoraConfig(), frozen=["lm_hed"])
    with pytest.raises(ValueError, match="nothing to train"):
        start(model_dir=model_dir, stage=0, lora=LoraConfig(), frozen=["*"])


def bfloat16(start: Any, model_dir: Path) -> None:
    """Skipped steps, and steps that are applied, with and without an adapter."""
    for stage in (0, 2, 3):  # 0 runs as 1
        for adapter in (LORA, LoraConfig()):
            made = start(model_dir=model_dir, stage=stage, lora=adapter, dtype="bfloat16")
            before = made.checksums()
            sick = random_sequences(8, seed=3)
            for sequence in sick:
                sequence.advantages[sequence.policy_mask] = float("inf")
            metrics = made.train_batch(sick)
            assert metrics["skipped_steps"] == 2 and metrics["alarm/nonfinite"] == 1 and made.checksums() == before
            healthy = made.train_batch(random_sequences(8, seed=3))
            assert healthy["skipped_steps"] == 0 and made.checksums() != before
            assert {tensor.dtype for _, tensor in made.weight_source()} == {torch.bfloat16}


@pytest.fixture(scope="module")
def results(model_dirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    finish([p for world in (1, 2) for p in run_ranks(all_cases, world, folder, *model_dirs)], folder)
    return folder


RUNS = [(1, 0), *((2, stage) for stage in STAGES)]


def load(results: Path, world: int, stage: int, rank: int = 0) -> dict[str, Any]:
    return torch.load(results / f"result_{world}_{stage}_{rank}.pt", weights_only=False)


def test_only_the_adapter_is_trained_and_merged_under_the_model_s_own_names(results, model_dirs):
    from safetensors.torch import load_file

    stored = {name: checksum(tensor) for name, tensor in load_file(model_dirs[0] / "model.safetensors").items()}
    for world, stage in RUNS:
        found = load(results, world, stage)
        assert found["loaded"] == found["base"] == stored
        changed = {name for name in stored if found["sums"][name] != stored[name]}
        assert found["sums"].keys() == stored.keys()
        assert changed == {name for name in stored if "_proj." in name}


def test_every_stage_and_rank_count_trains_the_adapter_alike(results):
    plain = load(results, 1, 0)["metrics"]
    for world, stage in RUNS[1:]:
        found = load(results, world, stage)["metrics"]
        for name in ("loss/policy", "grad/norm", "kl/mean", "entropy/mean"):
            assert found[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-6), (world, stage, name)


def test_an_adapter_s_checkpoint_holds_no_base_weights_and_repeats_itself(results, model_dirs):
    whole = (model_dirs[0] / "model.safetensors").stat().st_size
    for world, stage in RUNS:
        first, second = results / f"{world}_{stage}" / "first", results / f"{world}_{stage}" / "second"
        size = sum(file.stat().st_size for file in first.rglob("*") if file.is_file())
        assert size < whole  # with Adam's moments; the base and its reference would be twice the folder's size
        facts = [json.loads((each / "complete.json").read_text()) for each in (first, second)]
        assert facts[0] == facts[1]
        one, two = (torch.load(each / "reference.pt") for each in (first, second))
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
        for file in first.rglob("*_states.pt"):
            same_content(
                torch.load(file, weights_only=False), torch.load(second / file.relative_to(first), weights_only=False)
            )


def same_content(one: Any, two: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    elif isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            same_content(one[key], two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for pair in zip(one, two, strict=True):
            same_content(*pair)


def test_the_export_is_the_merged_model_and_the_adapter_beside_it(results, model_dirs):
    """Both ways of loading give the learner's log-probabilities, and peft's own merge the exported weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for world, stage in ((1, 0), (2, 3)):
        export = results / f"{world}_{stage}" / "export"
        merged = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
        base = AutoModelForCausalLM.from_pretrained(model_dirs[0], dtype=torch.float32)
        adapted = PeftModel.from_pretrained(base, export / "adapter")
        sequences = random_sequences(8, seed=5)
        ours: dict[int, np.ndarray] = {}
        for rank in range(world):
            ours |= load(results, world, stage, rank)["logprobs"]
        assert sorted(ours) == list(range(8))
        for model in (merged, adapted):
            for index, sequence in enumerate(sequences):
                ids = torch.from_numpy(sequence.token_ids)[None]
                logits = model(input_ids=ids, use_cache=False).logits[0, sequence.prompt_length - 1 : -1]
                logp = logits.log_softmax(-1).gather(1, ids[0, sequence.prompt_length :, None]).squeeze(1)
                theirs = np.where(sequence.policy_mask, logp.detach().numpy(), 0)
                np.testing.assert_allclose(ours[index], theirs, atol=1e-5)
        exported = {name: checksum(tensor) for name, tensor in merged.named_parameters()}
        assert exported == load(results, world, stage)["sums"]


def test_what_is_published_alone_is_the_adapter_as_it_is_exported(results, model_dirs):
    from safetensors.torch import load_file

    whole = sum(tensor.nbytes for tensor in load_file(model_dirs[0] / "model.safetensors").values())
    for world, stage in RUNS:
        tensors, settings, nbytes = load(results, world, stage)["published"]
        place = results / f"{world}_{stage}" / "export" / "adapter"
        exported = load_file(place / "adapter_model.safetensors")
        assert tensors.keys() == exported.keys() and all(
            torch.equal(tensors[name], exported[name]) for name in exported
        )
        assert settings == json.loads((place / "adapter_config.json").read_text()) and nbytes == whole


def test_merged_weights_are_those_of_exact_arithmetic_and_the_same_each_time(model_dirs):
    from learner.policy import choose_trained, load_policy

    policy = load_policy(model_dirs[0], dtype="float32", chunk=64)
    choose_trained(policy.causal_lm, adapter=LORA, frozen=[], seed=0)
    for layer in lora.layers(policy.causal_lm).values():
        torch.nn.init.normal_(lora.pieces(layer, lora.TRAINED)[1], std=0.1)
    source = WeightSource(policy.causal_lm)
    weights = {name: tensor.clone() for name, tensor in source}
    assert [(meta.name, meta.shape) for meta in source.metadata()] == [(n, tuple(t.shape)) for n, t in weights.items()]
    assert source.checksums() == {name: checksum(tensor) for name, tensor in weights.items()}
    for name, layer in lora.layers(policy.causal_lm).items():
        a, b = (piece.double() for piece in lora.pieces(layer, lora.TRAINED))
        exact = layer.get_base_layer().weight.double() + 2.0 * b @ a
        torch.testing.assert_close(weights[f"{name}.weight"].double(), exact, rtol=0, atol=2e-7)
