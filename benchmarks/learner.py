"""One training step of the learner beside TRL's GRPOTrainer, a plain padded loop, and the bare passes it makes.

All get the same trajectories, the same tiny model in float32, one thread and the same objective (GRPO's token loss, AdamW,
clipping); their gradient norms are compared, TRL's where it takes one update as the learner does. See benchmarks/sides/ for
what each of them does: `ours` (the learner, and the floor), `padded`, `trl_step` (what is and is not the same).

Each is a process of its own, so that memory is its own; they take turns. Seconds are the processor's, a ratio is the median
over turns. Memory is the most a process held beyond what it had with its model loaded. Tokens are those that a model must
read to train on each trajectory by itself; padding does not count, and a shared prompt counts for each that shares it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.sides.cases import Case, samples
from benchmarks.sides.process import Side
from benchmarks.sides.trl_environment import trl_python

CASES = [Case(50, 4, 1), Case(50, 4, 4), Case(250, 4, 1), Case(250, 4, 4), Case(2000, 1, 1)]
QUICK_CASES = [Case(50, 2, 1), Case(250, 2, 1), Case(2000, 1, 1)]
ROUNDS, QUICK_ROUNDS = 3, 1
SAME_NORM = 1e-3

Turn = dict[str, dict[str, float]]  # side -> seconds, peak_mib, norm


def run(quick: bool = False, trl: str | None = None) -> dict[str, Any]:
    """`rows`: one a case. `trl`: the Python of an environment with TRL; without it, one is made."""
    python = trl_python(trl)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder))
        sides = {
            "learner": Side("ours", folder),
            "padded": Side("padded", folder),
            "TRL": Side("trl_step", folder, python=python),
        }
        try:
            for side in sides.values():
                side.wait_until_up()
            cases, rounds = (QUICK_CASES, QUICK_ROUNDS) if quick else (CASES, ROUNDS)
            rows = [row(case, measured(sides, case, rounds)) for case in cases]
        finally:
            for side in sides.values():
                side.stop()
    return {"load before": before, "load after": os.getloadavg()[0], "rows": rows}


def measured(sides: dict[str, Side], case: Case, rounds: int) -> list[Turn]:
    """[rounds] what each side took, after one untimed turn in which the norms are compared."""
    for side in sides.values():
        side.ask(case=asdict(case), rounds=rounds + 1)
    turns: list[Turn] = []
    for number in range(rounds + 1):
        turn = {name: side.ask(do="step") for name, side in sides.items()}
        turn["floor"] = sides["learner"].ask(do="floor")
        if number == 0:
            check_norms({name: found["norm"] for name, found in turn.items()}, case)
        turns.append(turn)
    return turns[1:]


def check_norms(norms: dict[str, float], case: Case) -> None:
    """Raises RuntimeError where the sides did not make the same update."""
    compared = ["padded"] + (["TRL"] if case.updates == 1 else [])
    for name in compared:
        gap = abs(norms[name] / norms["learner"] - 1)
        if not gap <= SAME_NORM:
            raise RuntimeError(f"the gradient norms of the learner and of {name} differ by {gap:.1%}: {norms}")


def row(case: Case, turns: Sequence[Turn]) -> dict[str, Any]:
    """A case's line of the table. Peaks only grow, so the last turn has them."""
    made = samples(case)
    tokens = sum(sample.tokens for sample in made)
    seconds = {name: [turn[name]["seconds"] for turn in turns] for name in turns[0]}
    peaks = {name: turns[-1][name]["peak_mib"] for name in ("learner", "padded", "TRL")}
    longest = max(sample.tokens for sample in made)
    return {
        "prompt": case.prompt,
        "updates": case.updates,
        "mean/longest": f"{tokens / len(made):.0f}/{longest}",
        "learner tokens/s": tokens / statistics.median(seconds["learner"]),
        "TRL tokens/s": tokens / statistics.median(seconds["TRL"]),
        "padded tokens/s": tokens / statistics.median(seconds["padded"]),
        "floor tokens/s": tokens / statistics.median(seconds["floor"]),
        "times TRL": ratio(seconds["TRL"], seconds["learner"]),
        "times padded": ratio(seconds["padded"], seconds["learner"]),
        "share of the floor": ratio(seconds["floor"], seconds["learner"]),
        "learner MiB": peaks["learner"],
        "TRL MiB": peaks["TRL"],
        "padded MiB": peaks["padded"],
        "share of TRL's memory": peaks["learner"] / max(peaks["TRL"], 1e-9),
    }


def ratio(others: Sequence[float], own: Sequence[float]) -> float:
    """Median over turns of the other's seconds by one's own."""
    return statistics.median(other / mine for other, mine in zip(others, own, strict=True))


def _write_model(folder: Path) -> None:
    from toolrl.app.tiny_model import write_tiny_model

    write_tiny_model(folder, 0)
