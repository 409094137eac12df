"""ZeRO-3 loads a model in parts: no rank ever holds it whole, and it is the same model."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.requirements import need

need("deepspeed", "torch", "transformers")

import torch
from safetensors.torch import load_file, save_file

from learner.settings import RankSettings
from tests.integration.learner_ranks import finish, run_ranks
from tests.unit.learner_fixtures import random_sequences
from toolrl.app.tiny_model import write_tiny_model
from toolrl.config import AlgorithmConfig, LearnerConfig, Named

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]

MIB = 1 << 20
SPLIT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
ALGORITHM = AlgorithmConfig(regularizers=[Named("kl", {"weight": 0.1})])


def write_wide_model(folder: Path) -> int:
    """The tiny model with 12 layers of width 512: its size in bytes, float32."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    write_tiny_model(folder, 0)
    config = Qwen3Config.from_pretrained(
        folder, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, head_dim=64, num_attention_heads=8
    )
    config.layer_types = ["full_attention"] * 12
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("no RssAnon in /proc/self/status")


class PeakMemory:
    """The most anonymous memory inside the block, beyond what there was before."""

    def __enter__(self) -> PeakMemory:
        self.before, self.most, self._running = anonymous_bytes(), 0, True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while self._running:
            self.most = max(self.most, anonymous_bytes() - self.before)
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self._running = False
        self._thread.join()


def all_cases(rank: int, world: int, port: int, folder: Path, wide: Path, tiny: Path) -> None:
    from learner.rank import LearnerRank

    def start(model_dir: Path, stage: int) -> Any:
        config = LearnerConfig(
            zero_stage=stage, learning_rate=1e-2, updates_per_batch=2, deepspeed=SPLIT if stage == 3 else {}
        )
        return LearnerRank(RankSettings(str(model_dir), config, ALGORITHM), rank=rank, world=world, port=port)

    metrics = {}
    for stage in (0, 3):
        made = start(tiny, stage)  # joins the process group and imports what is imported late
        for batch in (3, 4):
            metrics[stage] = made.train_batch(random_sequences(8, seed=batch))
        if stage == 3:
            never_whole(made.models.policy), never_whole(made.models.reference.model)
    if rank == 0:
        torch.save(metrics, folder / "metrics.pt")
    memory_of_loading(rank, world, folder, wide)
    folders_that_do_not_fit(start, rank, folder, tiny)


def never_whole(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.numel() == 0, name
        assert parameter.ds_tensor.numel() <= -(-parameter.ds_numel // 2), name


def memory_of_loading(rank: int, world: int, folder: Path, wide: Path) -> None:
    from learner.deepspeed_engine import engine_settings
    from learner.policy import load_policy
    from learner.weight_source import WeightSource

    partition = engine_settings(LearnerConfig(zero_stage=3, deepspeed=SPLIT), dtype="float32", world=world)
    with PeakMemory() as peak:
        policy = load_policy(wide, dtype="float32", chunk=64, partition=partition)
    never_whole(policy)
    sums = WeightSource(policy.causal_lm).checksums()
    if rank == 0:
        with PeakMemory() as whole:
            plain = load_policy(wide, dtype="float32", chunk=64)
            for parameter in plain.parameters():
                parameter.data.mul_(1.0)  # from here on its pages are not the file's, as after a first step
        assert WeightSource(plain.causal_lm).checksums() == sums
        (folder / "whole.json").write_text(json.dumps(whole.most))
    (folder / f"peak{rank}.json").write_text(json.dumps(peak.most))


def folders_that_do_not_fit(start: Any, rank: int, folder: Path, tiny: Path) -> None:
    stored = load_file(tiny / "model.safetensors")
    lacking = {name: tensor for name, tensor in stored.items() if name != "model.norm.weight"}
    foreign = stored | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}
    for label, tensors, why in (
        ("lacking", lacking, r"lacks 1 of its tensors: model\.norm\.weight"),
        ("foreign", foreign, "holds 1 tensors that Qwen3ForCausalLM does not know"),
        ("none", None, "has no safetensors file"),
    ):
        place = folder / f"{label}{rank}"
        place.mkdir()
        (place / "config.json").write_text((tiny / "config.json").read_text())
        if tensors is not None:
            save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=why):
            start(place, 3)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    wide, tiny, folder = (tmp_path_factory.mktemp(name) for name in ("wide", "tiny", "ranks"))
    write_tiny_model(tiny, 0)
    size = write_wide_model(wide)
    (folder / "size.json").write_text(json.dumps(size))
    with pytest.MonkeyPatch.context() as patch:
        # glibc keeps what is freed in blocks below a threshold that grows to 32 MiB, more than any weight here has.
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
        processes = run_ranks(all_cases, 2, folder, wide, tiny)
    finish(processes, folder)
    return folder


def number(path: Path) -> int:
    return int(json.loads(path.read_text()))


def test_loading_needs_half_the_memory_with_two_ranks(results):
    size = number(results / "size.json")
    assert size > 100 * MIB
    assert number(results / "whole.json") > 0.9 * size  # the measurement sees a model that is loaded whole
    for rank in (0, 1):
        assert number(results / f"peak{rank}.json") < 0.7 * size, rank


def test_a_model_that_is_never_whole_trains_as_one_that_is(results):
    found = torch.load(results / "metrics.pt")
    for name in ("loss/policy", "grad/norm", "kl/mean", "entropy/mean"):
        assert found[3][name] == pytest.approx(found[0][name], rel=1e-3, abs=1e-6), name
