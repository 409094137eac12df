"""Planted collapses: how many of them the guards' presets see, how soon, and how often they cry in healthy runs.

Small real runs from one cold-started policy: 20 are left alone, in 5 of each kind a collapse is planted and grows (see
benchmarks/collapses/: `laboratory` for what is real, `plants` for what is done). Seeds, learning rates, strengths and the
step of the plant differ. The metrics of each run then go through the presets' rules as those of a training run do; nothing is
acted on, so what is measured is the seeing alone.

A plant is `seen` when a rule made for its kind fires after it was planted, and `told` when any rule does. A false alarm is a
firing in a healthy run, or in a planted one before the plant. Delays count steps from the first one under the plant.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.collapses.laboratory import laboratory
from benchmarks.collapses.plants import PLANTS
from benchmarks.collapses.small_run import Recorded, SmallRun, recorded
from toolrl import presets
from toolrl.config import Named
from toolrl.guards import presets as guard_presets
from toolrl.guards.replay import replay
from toolrl.guards.rule import Rule

HEALTHY, OF_EACH = 20, 5
QUICK_HEALTHY, QUICK_OF_EACH = 4, 1
STEPS, PLANTED_FROM = 16, 6
RATES = (1.0, 0.5, 1.5, 1.0, 0.75)  # of the preset's learning rate
STRENGTHS = (1.0, 0.8, 1.25, 1.5, 1.0)
SETTINGS = [
    "name=planted",
    "cold_start.traces=3072",
    "cold_start.steps=400",
    "learner.schedule=constant",
    "loop.groups_per_step=16",
    "loop.group_size=4",
]
PRESETS = ("watch", "standard")


def run(quick: bool = False, folder: str | None = None) -> dict[str, Any]:
    """`rows`: one a preset and kind of run; `runs`: every run with what fired.

    Args:
        folder: keeps the cold start for another time, and the metrics of every run; None: nothing is kept.
    """
    wanted = planned(QUICK_HEALTHY if quick else HEALTHY, QUICK_OF_EACH if quick else OF_EACH)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(folder or temporary)
        place.mkdir(parents=True, exist_ok=True)
        found = asyncio.run(all_recorded(wanted, place))
    fired = {preset: [firings(rules_of(preset), each) for each in found] for preset in PRESETS}
    rows = [row for preset in PRESETS for row in table(preset, found, fired[preset])]
    runs = [
        {"kind": each.kind, "seed": each.seed, "planted_at": each.planted_at}
        | {preset: fired[preset][index] for preset in PRESETS}
        for index, each in enumerate(found)
    ]
    return {"rows": rows, "runs": runs}


def planned(healthy: int, of_each: int) -> list[SmallRun]:
    """The runs, those of each seed together."""
    runs = [SmallRun(100 + seed, STEPS, RATES[seed % len(RATES)]) for seed in range(healthy)]
    for seed in range(of_each):
        at, rate, strength = PLANTED_FROM + seed % 3, RATES[seed % len(RATES)], STRENGTHS[seed % len(STRENGTHS)]
        runs += [SmallRun(seed, STEPS, rate, plant, at, strength) for plant in PLANTS]
    return runs


async def all_recorded(wanted: Sequence[SmallRun], folder: Path) -> list[Recorded]:
    """Every run; each is written to `folder`/runs.jsonl when it is done."""
    config = presets.load("quickstart-cpu", [*SETTINGS, f"loop.steps={len(wanted) * STEPS}"])
    found = []
    async with laboratory(config, folder) as lab:
        with (folder / "runs.jsonl").open("w") as file:
            for each in wanted:
                found.append(await recorded(lab, each))
                file.write(json.dumps(asdict(found[-1])) + "\n")
                file.flush()
    return found


def rules_of(preset: str) -> list[Rule]:
    """All of a preset's: those that raise the weight of the interaction reward too."""
    config = presets.load("quickstart-cpu", [*SETTINGS, f"guards.preset={preset}"])
    config.rewards.components.append(Named("interaction"))
    return guard_presets.rules(config)


def firings(rules: Sequence[Rule], run: Recorded) -> list[tuple[int, str]]:
    """(step, rule) of everything that fires."""
    return [(each.step, each.rule) for each in replay(rules, run.rows)[0]]


def table(preset: str, runs: Sequence[Recorded], fired: Sequence[list[tuple[int, str]]]) -> list[dict[str, Any]]:
    """One row a kind."""
    own = {plant.kind: plant.own_rules for plant in PLANTS}
    rows = []
    for kind in ["healthy", *own]:
        of_kind = [(run, alarms) for run, alarms in zip(runs, fired, strict=True) if run.kind == kind]
        if not of_kind:
            continue
        row: dict[str, Any] = {"preset": preset, "kind": kind, "runs": len(of_kind)}
        early = [[a for a in alarms if run.planted_at is None or a[0] < run.planted_at] for run, alarms in of_kind]
        row["false alarms"] = f"{sum(map(bool, early))} of {len(of_kind)}"
        if kind in own:
            seen = [_delay(run, alarms, own[kind]) for run, alarms in of_kind]
            told = [_delay(run, alarms, None) for run, alarms in of_kind]
            delays = [delay for delay in seen if delay is not None]
            row["seen"] = f"{len(delays)} of {len(of_kind)}"
            row["told"] = f"{sum(delay is not None for delay in told)} of {len(of_kind)}"
            row["delay mean"] = round(mean(delays), 1) if delays else ""
            row["delay max"] = max(delays, default="")
        rows.append({"seen": "", "told": "", "delay mean": "", "delay max": "", **row})
    columns = ("preset", "kind", "runs", "seen", "told", "delay mean", "delay max", "false alarms")
    return [{column: row[column] for column in columns} for row in rows]


def _delay(run: Recorded, alarms: Sequence[tuple[int, str]], rules: Sequence[str] | None) -> int | None:
    """Steps from the plant's first to the first firing of `rules` (None: of any); None: never."""
    assert run.planted_at is not None
    steps = [step for step, rule in alarms if step >= run.planted_at and (rules is None or rule in rules)]
    return steps[0] - run.planted_at + 1 if steps else None
