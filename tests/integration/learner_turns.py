"""A case of `test_learner_exact`: a learner that leaves its memory to engines between batches learns what one does that stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learner.settings import RankSettings
from tests.unit.learner_fixtures import random_sequences
from toolrl.config import AlgorithmConfig, LearnerConfig, Named

PARAMETERS_ON_THE_HOST = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
KINDS: tuple[dict[str, Any], ...] = (
    {"zero_stage": 1},
    {"zero_stage": 2, "offload": True},
    {"zero_stage": 3},
    {"zero_stage": 3, "offload": True, "deepspeed": PARAMETERS_ON_THE_HOST},
)


def making_room_changes_nothing(
    rank_class: Any, rank: int, world: int, port: int, model_dir: Path, folder: Path
) -> None:
    """Also before the first step, when there are no moments yet, and after a checkpoint was saved and loaded."""
    sequences = random_sequences(8, seed=3)
    algorithm = AlgorithmConfig(regularizers=[Named("kl", {"weight": 0.1})])
    for number, kind in enumerate(KINDS if world > 1 else ({"zero_stage": 0},)):
        sums = []
        for leaves in ("never", "always"):
            config = LearnerConfig(learning_rate=1e-2, updates_per_batch=1, offload_while_generating=leaves, **kind)
            made = rank_class(RankSettings(str(model_dir), config, algorithm), rank=rank, world=world, port=port)
            made.make_room()
            before = made.checksums()  # what is published while engines have the memory
            made.take_room()
            assert made.checksums() == before
            made.train_batch(sequences)
            saved = folder / f"turns_{world}_{number}_{leaves}"
            made.make_room()
            made.take_room()
            made.save_checkpoint(saved)
            made.load_checkpoint(saved)
            made.make_room()
            made.take_room()
            metrics = made.train_batch(sequences)
            assert metrics["skipped_steps"] == 0 and metrics["optimizer_steps"] == 2
            sums.append(made.checksums())
        assert sums[0] == sums[1], kind
