"""`toolrl eval`: a model on held-out tasks."""

from __future__ import annotations

import json

import typer

from toolrl.app.cli.app import OVERRIDES, RUNS_DIR, TRAIN, app, err, example, need_engines, out
from toolrl.app.viewer.evaluation import evaluation_view
from toolrl.app.viewer.ood import ood_view


@app.command(
    "eval",
    rich_help_panel=TRAIN,
    epilog=example(
        "toolrl eval quickstart-cpu",
        "toolrl eval quickstart-cpu --samples 8 --temperature 0.7",
        "toolrl eval quickstart-cpu --ood",
        "toolrl eval Qwen/Qwen2.5-1.5B-Instruct --settings single-gpu-1.5b",
    ),
)
def evaluate(
    run_or_model: str = typer.Argument(metavar="RUN_OR_MODEL", help="A run, or with --settings any model."),
    overrides: list[str] = OVERRIDES,
    settings: str = typer.Option(None, "--settings", help="Preset or file with tasks, tools and limits for a model."),
    samples: int = typer.Option(None, "--samples", "-k", min=1, help="Episodes a task: k of avg@k and pass@k."),
    temperature: float = typer.Option(None, "--temperature", min=1e-3, help="Of sampling; default: the run's."),
    ood: bool = typer.Option(False, "--ood", help="Also under the variants of eval.ood: other names, format, words, …"),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
    runs_dir: str = RUNS_DIR,
) -> None:
    """Measure a model on held-out tasks.

    Accuracy, avg@k, pass@k, tool-call rate, calls per episode, format validity; by task family.
    A run's trained model, or the one it started from if it has none yet. With --ood also out of distribution, side by
    side: tools under other names, another call format, reworded prompts, harder ranges, failing tools.
    """
    need_engines()
    from toolrl.app import evaluate as evaluation

    chosen = evaluation.subject(run_or_model, overrides or [], settings=settings, runs_dir=runs_dir)
    err().print(f"evaluating {chosen.model_dir} on {chosen.config.tasks.held_out_tasks} held-out tasks", markup=False)
    table = evaluation.evaluate(chosen, samples=samples, temperature=temperature, out_of_distribution=ood)
    if as_json:
        print(json.dumps(table, indent=1))
        return
    out().print(evaluation_view(table))
    if ood:
        out().print(ood_view(table["ood"]))
    out().print(f"kept in {chosen.report_dir}", markup=False)
