"""`toolrl show`: stored trajectories, for people."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from toolrl.app import runs
from toolrl.app.cli.app import LOOK, RUN, RUNS_DIR, app, example, out
from toolrl.app.viewer.outcome_table import outcome_table
from toolrl.app.viewer.trajectory_text import trajectory_text
from toolrl.errors import UserError
from toolrl.monitors.metrics_log import read_metrics


@app.command(
    rich_help_panel=LOOK,
    epilog=example(
        "toolrl show quickstart-cpu",
        "toolrl show quickstart-cpu --step 20 --limit 1",
        "toolrl show quickstart-cpu --step 20 --outcome no_answer",
    ),
)
def show(
    run: str = RUN,
    step: int = typer.Option(None, "--step", "-s", help="The training step; default: the last one stored."),
    limit: int = typer.Option(4, "--limit", "-n", min=1, help="How many at most."),
    family: str = typer.Option(None, "--family", help="Only of this task family."),
    outcome: str = typer.Option(None, "--outcome", help="Only with this outcome, e.g. answered."),
    runs_dir: str = RUNS_DIR,
) -> None:
    """Read what the policy wrote at a step, and how the step's trajectories ended.

    From the best reward to the worst, turn by turn: the policy's text with
    its mean log-probability, the tools' results, rewards, outcome and staleness.
    """
    from toolrl import trajectory_parquet

    folder = runs.find(run, runs_dir)
    step = chosen_step(folder, step)
    found = list(trajectory_parquet.read(folder / "trajectories" / f"step-{step}.parquet"))
    kept = [
        t
        for t in found
        if (family is None or t.metadata.get("family") == family) and (outcome is None or t.outcome == outcome)
    ]
    if not kept:
        have = ", ".join(sorted({f"{t.metadata.get('family', '?')}: {t.outcome}" for t in found}))
        raise UserError(f"none of the {len(found)} stored trajectories of step {step} match; stored: {have}")
    metrics = next((row for row in read_metrics(folder) if row["step"] == step), None)
    version = int(metrics["version"]) - 1 if metrics is not None else None
    decode = _decoder(folder / "model" / "tokenizer.json")
    console = out()
    console.print(
        f"[bold]{folder.name}, step {step}[/bold]: {min(limit, len(kept))} of {len(found)} stored trajectories\n"
    )
    if metrics is not None and (ends := outcome_table(metrics)) is not None:
        console.print(ends)
    for trajectory in kept[:limit]:
        console.print(trajectory_text(trajectory, learner_version=version, decode=decode))


def chosen_step(folder: Path, step: int | None) -> int:
    """The step asked for, or the last stored one. Raises UserError naming the stored ones."""
    stored = sorted(int(path.stem.removeprefix("step-")) for path in (folder / "trajectories").glob("step-*.parquet"))
    if not stored:
        raise UserError(
            f"{folder} holds no trajectories yet; they are written after each step (loop.shown_trajectories_per_step)"
        )
    if step is None:
        return stored[-1]
    if step not in stored:
        closest = min(stored, key=lambda known: abs(known - step))
        raise UserError(
            f"no trajectories of step {step}; stored: {stored[0]} to {stored[-1]}, closest --step {closest}"
        )
    return step


def _decoder(tokenizer: Path) -> Callable[[Sequence[int]], str] | None:
    """The run's tokenizer, where it and the package are there."""
    if not tokenizer.is_file() or importlib.util.find_spec("tokenizers") is None:
        return None
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer))
    return lambda ids: str(loaded.decode(list(ids), skip_special_tokens=False))
