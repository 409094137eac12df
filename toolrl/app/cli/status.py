"""`toolrl status`: how a run stands."""

from __future__ import annotations

import typer

from toolrl.app.cli.app import LOOK, RUNS_DIR, app, example, out

RUN = typer.Argument(metavar="RUN", help="A run's name or its folder, or the name of a launch.")


@app.command(
    rich_help_panel=LOOK, epilog=example("toolrl status quickstart-cpu", "toolrl status math --runs-dir /runs")
)
def status(run: str = RUN, runs_dir: str = RUNS_DIR) -> None:
    """Say how a run stands: here, or on the cluster that it was launched on."""
    from toolrl.app.run_status import find, status_lines

    found = find(run, runs_dir)
    console = out()
    console.print(f"[bold]{found.name}[/bold]")
    for line in status_lines(found):
        console.print(f"  {line}", markup=False)
