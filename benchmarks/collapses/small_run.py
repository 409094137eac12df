"""One small run, healthy or with a plant, as rows of the metrics that a real run would have written."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.collapses.laboratory import Laboratory
from benchmarks.collapses.plants import Plant


@dataclass(frozen=True)
class SmallRun:
    """What is to be run."""

    seed: int
    steps: int
    lr_factor: float = 1.0
    plant: Plant | None = None
    planted_at: int = 0  # the first step under the plant
    strength: float = 1.0


@dataclass
class Recorded:
    """What came of it."""

    kind: str
    seed: int
    planted_at: int | None
    rows: list[dict[str, float]] = field(default_factory=list)


async def recorded(lab: Laboratory, run: SmallRun) -> Recorded:
    """Plays, learns, measures `run.steps` times."""
    plant = run.plant
    lab.begin(run.seed, run.lr_factor)
    found = Recorded("healthy" if plant is None else plant.kind, run.seed, run.planted_at if plant else None)
    for step in range(1, run.steps + 1):
        groups = await lab.play(step)
        sequences = lab.sequences(groups)
        age = step - run.planted_at + 1
        if plant is not None and plant.before is not None and age > 0:
            sequences = plant.before(lab, groups, sequences, run.strength)
        metrics = lab.metrics(groups, step - 1) | lab.rank.train_batch(sequences)
        if plant is not None and plant.after is not None and age > 0:
            plant.after(lab, groups, age, run.strength, run.seed)
        lab.publish(step)
        found.rows.append({"step": step, **metrics})
    return found
