"""What the learner's monitors say of one batch, for ranks that other tests have started: see `test_learner_exact.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.settings import RankSettings
from tests.unit.monitor_fixtures import CONTROL, expected_control_metrics, played_sequences, turn_likelihoods
from toolrl.config import AlgorithmConfig, LearnerConfig, MonitorsConfig

UPDATES = 3


def monitors_of_one_batch(rank_class: Any, rank: int, world: int, port: int, model_dir: Path, folder: Path) -> None:
    """Trains on one batch, writes its metrics and the weights after it; and a batch that moves nothing.

    Two ranks split the model in the first case, and share each row in the second.
    """
    sequences = played_sequences()
    found = {}
    two = world > 1
    cases = (("moved", 1e-3, 1, {"zero_stage": 3 * two}), ("still", 0.0, 2, {"sequence_parallel": 1 + two}))
    for name, rate, every, split in cases:
        learner = LearnerConfig(learning_rate=rate, updates_per_batch=UPDATES, tokens_per_micro_batch=150, **split)
        settings = RankSettings(
            str(model_dir),
            learner,
            AlgorithmConfig(regularizers=[]),
            control=CONTROL,
            monitors=MonitorsConfig(every_steps=every, trajectories=3),
        )
        made = rank_class(settings, rank=rank, world=world, port=port)
        found[name] = made.train_batch(sequences)
        if name == "moved":
            made.export_hf(folder / f"monitored_{world}")
        else:
            found["not_due"] = made.train_batch(sequences)
    if rank == 0:
        torch.save(found, folder / f"monitors_{world}.pt")


def check_monitors(folder: Path, model_dir: Path) -> None:
    """One rank and two say the same, and it is what float64 says of the weights before and after."""
    from transformers import AutoModelForCausalLM

    one, two = (torch.load(folder / f"monitors_{world}.pt") for world in (1, 2))
    for name, metrics in one.items():
        assert two[name].keys() == metrics.keys()
        for key, value in metrics.items():
            if key.startswith(("control/", "entropy/decision", "likelihood/")):
                assert two[name][key] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, key)
            elif key.startswith("displacement/"):  # Adam makes much of a gradient's rounding
                assert two[name][key] == pytest.approx(value, rel=0.02, abs=1e-4), (name, key)
    before, after = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64)
        for place in (model_dir, folder / "monitored_1")
    )
    sequences = played_sequences()
    for key, value in expected_control_metrics(before, sequences).items():
        assert one["moved"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    correct = [sequence for sequence in sequences if sequence.is_correct]
    chosen = [correct[index * len(correct) // 3] for index in range(3)]
    was, is_now = turn_likelihoods(before, chosen), turn_likelihoods(after, chosen)
    changes = np.asarray([new - old for (_, old), (_, new) in zip(was, is_now, strict=True)])
    expected = {"displacement/mean": changes.mean(), "displacement/share_sinking": (changes < 0).mean()}
    turns = np.asarray([min(turn, 8) for turn, _ in was])
    for turn in np.unique(turns):
        name = f"turn_{turn + 1}" if turn < 8 else "turn_9_on"
        expected[f"displacement/{name}"] = changes[turns == turn].mean()
        expected[f"likelihood/correct/{name}"] = np.asarray([old for _, old in was])[turns == turn].mean()
    for key, value in expected.items():
        assert one["moved"][key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    said = {key for key in one["moved"] if key.startswith(("displacement/", "likelihood/"))}
    assert said == set(expected)
    assert {one["still"][key] for key in one["still"] if key.startswith("displacement/")} == {0.0}
    assert not any(key.startswith(("displacement/", "likelihood/")) for key in one["not_due"])
    assert one["not_due"]["control/mass_outside"] > 0
