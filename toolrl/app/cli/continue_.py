"""`toolrl continue`: a run that a guard paused goes on."""

from __future__ import annotations

import typer

from toolrl.app import control, runs
from toolrl.app.cli.app import RUN, RUNS_DIR, TRAIN, app, example, out


@app.command(
    "continue",
    rich_help_panel=TRAIN,
    epilog=example("toolrl continue quickstart-cpu", "toolrl continue runs/math --roll-back"),
)
def continue_(
    run: str = RUN,
    roll_back: bool = typer.Option(False, "--roll-back", help="From the last good checkpoint's weights."),
    runs_dir: str = RUNS_DIR,
) -> None:
    """Let a run go on that a guard has paused.

    What the guard saw is in [cyan]toolrl explain[/cyan]. To go on with other settings, stop the run and resume it with them.
    """
    folder = runs.find(run, runs_dir).resolve()
    why = control.give_order(folder, "continue", {"roll_back": roll_back})
    out().print(f"run {folder.name} goes on; it was paused because {why}", markup=False)
