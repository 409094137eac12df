"""Every action of a guard in a run of its own on the quickstart's model: what set it off, what it changed, that it ended.

Each case is `toolrl train` from one common cold start, six steps, with one rule. The rule's metric is one that is sure to
cross its limit, mostly the count of optimiser steps, so that the firing is known beforehand and the trouble ends by itself;
whether real trouble is seen is measured elsewhere. What an action changed is read from what the run left: metrics, journal,
ledger, checkpoints. Where a run pauses, it is continued or stopped with the command line, as a person would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.sides.commands import toolrl
from benchmarks.sides.process import ROOT
from toolrl.guards.journal import read_journal
from toolrl.monitors.metrics_log import read_metrics

STEPS, GROUPS, SIZE, RATE = 6, 4, 4, 2e-4
START = {"steps": 120, "traces": 768, "batch_size": 32}
QUICK = ("lower_lr", "sft_burst", "roll_back")
WAITS_S = 1200.0


@dataclass(frozen=True)
class Left:
    """What a run left."""

    folder: Path

    @property
    def rows(self) -> list[dict[str, float]]:
        return read_metrics(self.folder)

    @property
    def journal(self) -> list[dict[str, Any]]:
        return read_journal(self.folder)

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Lines of a kind; of those that end something, only the actions' own."""
        return [line for line in self.journal if line["kind"] == kind and line.get("what", "action") == "action"]

    def values(self, name: str) -> list[float]:
        return [row.get(name, 0.0) for row in self.rows]

    def ledger(self) -> dict[str, Any]:
        from actors.replay import read_ledger

        return read_ledger(self.folder / "ledger.sqlite").as_dict()

    def weights(self, step: int) -> dict[str, Any]:
        """Of the policy in a checkpoint."""
        import torch

        (path,) = (self.folder / "checkpoints" / f"step-{step}").rglob("mp_rank_00_model_states.pt")
        found: dict[str, Any] = torch.load(path, weights_only=False)["module"]
        return found


@dataclass(frozen=True)
class Case:
    """One run. `judged` says what the action changed and whether that is what it should have."""

    action: str
    options: dict[str, Any]
    judged: Callable[[Left], tuple[str, bool]]
    metric: str = "optimizer_steps"  # two a step
    condition: str = "below"
    threshold: float = 5.0  # below it in the first two steps
    cool_down_steps: int = 100
    settings: dict[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = ()  # what a person types when the run pauses


def lower_lr(run: Left) -> tuple[str, bool]:
    rates = run.values("lr")
    return f"learning rate {_row(rates)}", rates == [RATE, RATE / 2, RATE / 2, RATE, RATE, RATE]


def kl(run: Left) -> tuple[str, bool]:
    found = run.values("kl/mean")
    return f"KL in the loss {_row(found)}", [value > 0 for value in found] == [False, True, True, False, False, False]


def llds(run: Left) -> tuple[str, bool]:
    present = [float("loss/llds" in row) for row in run.rows]
    weights = run.values("controls/llds_weight")
    return f"LLDS's weight {_row(weights)}", present == [0, 1, 1, 0, 0, 0] and weights == [0, 0.2, 0.2, 0, 0, 0]


def interaction_weight(run: Left) -> tuple[str, bool]:
    weights = run.values("controls/reward_weight/interaction")
    rises = [round(weight, 6) for weight in weights[1:3]] == [0.1, 0.15]
    return f"the reward's weight {_row(weights)}", rises and weights[2] > weights[3] > weights[-1] == 0


def reject_batch(run: Left) -> tuple[str, bool]:
    ledger, count = run.ledger(), GROUPS * SIZE
    right = ledger["dropped"] == {"rejected": count} and ledger["trained"] == STEPS * count and ledger["balances"]
    return f"{count} samples dropped as rejected, {ledger['trained']} trained", bool(right)


def reject_and_stop(run: Left) -> tuple[str, bool]:
    ledger, count = run.ledger(), GROUPS * SIZE
    right = ledger["dropped"].get("rejected") == 2 * count and ledger["trained"] == 0 and ledger["balances"]
    stopped = run.told("ended")[-1]["answer"] == "stop" and (run.folder / "checkpoints" / "step-0").is_dir()
    return f"{2 * count} samples dropped, paused, stopped with a checkpoint", bool(right and stopped)


def sft_burst(run: Left) -> tuple[str, bool]:
    done, versions = run.told("done")[0], run.values("version")
    published = done["version"] == versions[0] + 1 == versions[1] - 1
    steps = run.values("optimizer_steps") == [2.0 * step for step in range(1, STEPS + 1)]  # the schedule has not moved
    return f"supervised loss {_row(done['losses'])}", len(done["losses"]) == 4 and published and steps


def roll_back(run: Left) -> tuple[str, bool]:
    import torch

    done = run.told("done")[0]
    before, after, bad = (run.weights(step) for step in (done["to_step"], 4, 3))
    same = all(torch.equal(before[name], after[name]) for name in before)
    other = any(not torch.equal(bad[name], after[name]) for name in bad)
    later = run.rows[4]["staleness/max"] <= 1 and run.rows[4]["version"] == done["version"] + 1
    return f"weights of step {done['to_step']} as version {done['version']}", same and other and later


def pause(run: Left) -> tuple[str, bool]:
    issued = run.ledger()["issued"]
    answer = run.told("ended")[0]["answer"]
    return f"stood still until told to {answer}", answer == "continue" and issued == STEPS * GROUPS * SIZE


def tell(run: Left) -> tuple[str, bool]:
    controls = {name: value for row in run.rows for name, value in row.items() if name.startswith("controls/")}
    return "nothing", controls == {"controls/lr_factor": 1.0, "controls/kl_weight": 0.0, "controls/llds_weight": 0.0}


BRIEF = {"steps": 1, "fade": 0.0}
INTERACTION = {"rewards": {"components": ["outcome", "format", "interaction"], "weights": {"interaction": 0.0}}}
CASES = {
    "lower_lr": Case("lower_lr", BRIEF, lower_lr),
    "kl": Case("kl", {**BRIEF, "weight": 0.05}, kl),
    "llds": Case("llds", BRIEF, llds),
    "interaction_weight": Case(
        "interaction_weight", {"steps": 1, "fade": 0.2}, interaction_weight, cool_down_steps=0, settings=INTERACTION
    ),
    "reject_batch": Case("reject_batch", {}, reject_batch, "turns/mean", "above", 0.0),
    "reject_batch, too often": Case(
        "reject_batch", {"most_in_a_row": 2}, reject_and_stop, "turns/mean", "above", 0.0, 0, order=("stop",)
    ),
    "sft_burst": Case("sft_burst", {"steps": 4, "learning_rate": 1e-4}, sft_burst),
    "roll_back": Case("roll_back", {"margin_steps": 2}, roll_back, condition="above", threshold=7.0),
    "pause": Case("pause", {}, pause, order=("continue",)),
    "tell": Case("tell", {}, tell),
}


def run(quick: bool = False) -> dict[str, Any]:
    """`rows`: one an action; `journals`: what each run's guards saw and did. `--quick`: three of the actions."""
    chosen = QUICK if quick else tuple(CASES)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        toolrl("cold-start", {**_settings("start"), "cold_start": START}, folder)
        done = {name: _done(name, CASES[name], folder) for name in chosen}
        rows = [_judged(name, CASES[name], left, seconds) for name, (left, seconds) in done.items()]
        return {"rows": rows, "journals": {name: left.journal for name, (left, _) in done.items()}}


def _judged(name: str, case: Case, left: Left, seconds: float) -> dict[str, Any]:
    seen, ended = left.told("seen"), left.told("ended")
    changed, right = case.judged(left)
    one_off = case.action in ("reject_batch", "sft_burst", "roll_back", "tell")
    evidence = seen[0]["evidence"]
    return {
        "action": name,
        "set off by": f"{case.metric} {evidence['level']:.4g}, {case.condition} {evidence['limit']:.4g}",
        "at step": seen[0]["step"],
        "did": left.told("done")[0]["text"],
        "changed": changed,
        "ended": f"step {ended[-1]['step']}" if ended else "with itself" if one_off else "not",
        "as it should": right and bool(ended or one_off),
        "seconds": round(seconds),
    }


def _settings(name: str) -> dict[str, Any]:
    return {
        "base": "quickstart-cpu",
        "name": name,
        "seed": 1,
        "sandbox": {"backend": "process", "min_sessions": 2, "max_sessions": 8},
        "tasks": {"held_out_tasks": 0},
        "learner": {"schedule": "constant", "learning_rate": RATE, "updates_per_batch": 2},
        "loop": {"steps": STEPS, "groups_per_step": GROUPS, "group_size": SIZE, "checkpoint_every_steps": 1},
    }


def _done(name: str, case: Case, folder: Path) -> tuple[Left, float]:
    """Runs a case to its end."""
    place = folder / name.replace(", ", "-").replace(" ", "-")
    place.mkdir()
    rule = {
        "name": "guard",
        "metric": case.metric,
        "condition": case.condition,
        "threshold": case.threshold,
        "cool_down_steps": case.cool_down_steps,
        "action": {"name": case.action, "options": case.options},
    }
    start = folder / "start" / "cold-start"
    wanted: dict[str, Any] = {
        **_settings("run"),
        "model": {"path": str(start / "model"), "dtype": "float32"},
        "cold_start": {"steps": 0},
        "supervision": {"references": {"path": str(start / "traces.parquet")}},
        "guards": {"rules": [rule]},
        **case.settings,
    }
    wanted["loop"] = {**wanted["loop"], "keep_checkpoints": STEPS}
    left, over = Left(place / "run"), threading.Event()
    person = threading.Thread(target=_answer, args=(left, case.order, over))
    person.start()
    began = time.monotonic()
    try:
        toolrl("train", wanted, place)
    finally:
        over.set()
        person.join()
    return left, time.monotonic() - began


def _answer(left: Left, order: tuple[str, ...], over: threading.Event) -> None:
    """Waits for the run to pause and types `toolrl ORDER RUN`."""
    while order and not over.wait(0.5):
        paused = (left.folder / "guards.jsonl").is_file() and any(
            "paused" in line["text"] for line in left.told("done")
        )
        if paused:
            line = [sys.executable, "-m", "toolrl.app.cli", *order, "run", "--runs-dir", str(left.folder.parent)]
            subprocess.run(line, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=WAITS_S)
            return


def _row(values: list[float]) -> str:
    return " ".join(f"{value:.3g}" for value in values)


if __name__ == "__main__":
    print(json.dumps(run("--quick" in sys.argv), indent=1))
