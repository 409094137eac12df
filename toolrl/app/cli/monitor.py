"""`toolrl monitor`: how a run fares, from what it has stored."""

from __future__ import annotations

import json

import typer

from toolrl.app import runs
from toolrl.app.cli.app import LOOK, RUN, RUNS_DIR, app, err, example, out
from toolrl.errors import UserError

ONLY = typer.Option(None, "--only", help="Only these metrics; * stands for anything. Repeatable.")


@app.command(
    rich_help_panel=LOOK,
    epilog=example(
        "toolrl monitor quickstart-cpu",
        "toolrl monitor quickstart-cpu --only 'control/*' --only 'format/*' --columns 10",
        "toolrl monitor quickstart-cpu --json > monitors.json",
    ),
)
def monitor(
    run: str = RUN,
    only: list[str] = ONLY,
    every: bool = typer.Option(False, "--all", help="Every metric, not only those that tell of a collapse."),
    columns: int = typer.Option(6, "--columns", min=1, help="So many steps, evenly from the first to the last."),
    as_json: bool = typer.Option(False, "--json", help="Every metric of every step as JSON, with where it is from."),
    runs_dir: str = RUNS_DIR,
) -> None:
    """Show a run's monitors over its steps, read again from its trajectories where they are kept.

    `recomputed` was read off the step's whole batch, `stored` was written down
    while the run went on, `sample` was read off the trajectories that are shown.
    """
    from toolrl.app.monitor import monitor_run
    from toolrl.app.viewer.monitor_table import monitor_table, names_in, spread
    from toolrl.monitors.known_metrics import COLLAPSE, suggestion

    folder = runs.find(run, runs_dir)
    steps = monitor_run(folder)
    if as_json:
        print(json.dumps([step.as_dict() for step in steps], indent=1, allow_nan=False))
        return
    shown = spread(steps, columns)
    names = names_in(shown, only or (["*"] if every else [*COLLAPSE, "guard/*", "controls/*"]))
    if not names:
        raise UserError(f"no metric of {folder.name} fits {', '.join(only)}{suggestion(only[0])}")
    out().print(monitor_table(shown, names, f"{folder.name}: {len(steps)} steps"))
    differing = sorted({name for step in steps for name in step.differing})
    if differing:
        err().print(
            f"[yellow]not as written down at the time:[/yellow] {', '.join(differing)} "
            "(this version reads them otherwise, or the run's files were changed)"
        )
