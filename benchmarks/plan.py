"""What `toolrl plan` predicts against what runs do: the quickstart with other bounds and batches than it was measured with.

One run of the quickstart that takes turns (staleness 0) gives the rates. From them the plan predicts the seconds of a step for
other staleness bounds, batches and numbers of concurrent episodes; then each of these runs is made. All start from one
checkpoint, with a rate of learning so small that the policy stays as it is. Steps count from where the pipeline is full.

Measured run and predicted ones are made in rounds, each with rates of its own: a machine whose speed changes between two
rounds changes both sides of a ratio, and how far a variant's rounds lie apart says how much of an error is the machine's.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

from benchmarks.sides.commands import toolrl
from toolrl import presets
from toolrl.app.run_rates import run_rates
from toolrl.planning import Forecast, Layout, Rates, simulate
from toolrl.planning.rates import flat

STEPS, START_STEPS, ROUNDS = 18, 400, 2
QUICK_STEPS, QUICK_START_STEPS = 5, 20
MEASURED_WITH: dict[str, Any] = {"buffer": {"max_staleness": 0}}
PREDICTED: dict[str, dict[str, Any]] = {
    "staleness 0": {"buffer": {"max_staleness": 0}},
    "staleness 1": {"buffer": {"max_staleness": 1}},
    "staleness 2": {"buffer": {"max_staleness": 2}},
    "staleness 1, batch 64": {"buffer": {"max_staleness": 1}, "loop": {"groups_per_step": 8}},
    "staleness 0, batch 256": {"buffer": {"max_staleness": 0}, "loop": {"groups_per_step": 32}},
    "staleness 0, 16 episodes at once": {"buffer": {"max_staleness": 0}, "rollout": {"concurrency": 16}},
}


def run(quick: bool = False, folder: Path = Path("bench-results/plan")) -> dict[str, Any]:
    """`rows`: one a variant, with its predicted and its real step."""
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    steps = QUICK_STEPS if quick else STEPS
    before = os.getloadavg()[0]
    start = settings("start", "tiny:qwen3", {}, 1) | {
        "cold_start": {"steps": QUICK_START_STEPS if quick else START_STEPS}
    }
    toolrl("cold-start", start, folder)
    model = folder / "start" / "cold-start" / "model"
    rounds = [one_round(folder / f"round-{number}", model, steps) for number in range(1 if quick else ROUNDS)]
    rows = []
    for name in PREDICTED:
        told = [predicted[name] for predicted, _, _ in rounds]
        met = [real[name] for _, real, _ in rounds]
        ratios = [forecast.step_s / real_s for forecast, real_s in zip(told, met, strict=True)]
        rows.append(
            {
                "variant": name,
                "predicted step, s": statistics.fmean(forecast.step_s for forecast in told),
                "real step, s": statistics.fmean(met),
                "predicted / real": statistics.geometric_mean(ratios),
                "by round": ", ".join(f"{ratio:.2f}" for ratio in ratios),
                "real, slowest / fastest round": max(met) / min(met),
                "bottleneck": told[0].bottleneck.partition(":")[0],
            }
        )
    ratios = [row["predicted / real"] for row in rows]
    return {
        "load before": before,
        "load after": os.getloadavg()[0],
        "largest error": max(abs(ratio - 1) for ratio in ratios),
        "rates": [{name: round(value, 6) for name, value in flat(rates).items()} for _, _, rates in rounds],
        "rows": rows,
    }


def one_round(folder: Path, model: Path, steps: int) -> tuple[dict[str, Forecast], dict[str, float], Rates]:
    """What was predicted and what was met, by variant, and the rates that the round's own first run gave."""
    folder.mkdir()
    train(folder, "measured", model, MEASURED_WITH, steps)
    rates = run_rates(folder / "measured")
    predicted, real = {}, {}
    for name, changes in PREDICTED.items():
        run_name = name.replace(",", "").replace(" ", "-")
        config = presets.load(str(train(folder, run_name, model, changes, steps)))
        predicted[name] = simulate(rates, Layout.of(config), steps=40)
        real[name] = step_s(folder / run_name, config.buffer.max_staleness + 1)
    return predicted, real, rates


def train(folder: Path, name: str, model: Path, changes: dict[str, Any], steps: int) -> Path:
    """Makes a run; returns its stored config."""
    toolrl("train", settings(name, str(model), changes, steps), folder)
    return folder / name / "config.yaml"


def settings(name: str, model: str, changes: dict[str, Any], steps: int) -> dict[str, Any]:
    """The quickstart with these changes."""
    loop = {
        "steps": steps,
        "checkpoint_every_steps": steps,
        "shown_trajectories_per_step": 64,
        **changes.get("loop", {}),
    }
    return {
        "base": "quickstart-cpu",
        **changes,
        "name": name,
        "model": {"path": model},
        "tasks": {"held_out_tasks": 0},
        "learner": {"learning_rate": 1e-9},
        "cold_start": {"steps": 0},
        "loop": loop,
    }


def step_s(folder: Path, first: int) -> float:
    """Seconds of a step, from where the pipeline is full to the end."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return float(rows[-1]["time_s"] - rows[first]["time_s"]) / (len(rows) - 1 - first)
