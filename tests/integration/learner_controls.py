"""What a guard turns in a learner is as exact as a setting: cases for real ranks, run by test_learner_exact.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from learner.settings import RankSettings
from tests.unit.learner_fixtures import random_sequences
from toolrl.config import AlgorithmConfig, LearnerConfig, Named

EXTRA = [Named("kl", {"weight": 0.25}), Named("llds", {"weight": 0.5})]


def controls_are_as_exact_as_settings(rank_class: Any, rank: int, world: int, port: int, model_dir: Path) -> None:
    """Extra weights and a factor on the rate give the weights, to the bit, that the same numbers in the config give; taken
    back, they leave nothing behind."""
    first, second = random_sequences(8, seed=3), random_sequences(8, seed=4)
    learner = LearnerConfig(
        learning_rate=1e-2, updates_per_batch=4, zero_stage=2 if world > 1 else 0, gradient_clip=0.0
    )
    plain = RankSettings(str(model_dir), learner, AlgorithmConfig(regularizers=[]), keep_reference=True)
    configured = replace(
        plain, learner=replace(learner, learning_rate=2.5e-3), algorithm=AlgorithmConfig(regularizers=EXTRA)
    )

    def made(settings: RankSettings) -> Any:
        return rank_class(settings, rank=rank, world=world, port=port)

    turned, wanted = made(plain), made(configured)
    turned.set_controls(0.25, 0.25, 0.5)
    mine, theirs = turned.train_batch(first), wanted.train_batch(first)
    for name in ("kl/mean", "loss/llds", "loss/policy", "grad/norm", "lr"):
        assert mine[name] == theirs[name], name
    assert mine["kl/mean"] > 0 and mine["loss/llds"] > 0 and mine["lr"] == 2.5e-3
    assert turned.checksums() == wanted.checksums()

    turned.set_controls()
    assert turned.train_batch(second)["lr"] == 1e-2
    wanted.set_controls(4.0, -0.25, -0.5)
    wanted.train_batch(second)
    assert turned.checksums() == wanted.checksums()

    without = made(replace(plain, keep_reference=False))
    try:
        without.set_controls(kl_weight=0.1)
    except ValueError as error:
        assert "keep_reference" in str(error)
    else:
        raise AssertionError("KL to a reference that is not there was accepted")


def going_back_keeps_the_clock(
    rank_class: Any, rank: int, world: int, port: int, model_dir: Path, folder: Path
) -> None:
    """A roll-back loads weights and optimiser and leaves the schedule where it is."""
    learner = LearnerConfig(learning_rate=1e-3, updates_per_batch=2, schedule="linear")
    made = rank_class(
        RankSettings(str(model_dir), learner, AlgorithmConfig(), total_steps=8), rank=rank, world=world, port=port
    )
    made.train_batch(random_sequences(8, seed=3))
    made.save_checkpoint(folder / f"good_{world}")
    good = made.checksums()
    made.train_batch(random_sequences(8, seed=4))
    rate = made.steps.rate()
    assert made.checksums() != good
    made.load_checkpoint(folder / f"good_{world}", keep_counters=True)
    assert made.checksums() == good and made.steps.rate() == rate and made.steps.taken == 4
    made.load_checkpoint(folder / f"good_{world}")
    assert made.steps.taken == 2 and made.steps.rate() > rate
