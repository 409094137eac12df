"""`toolrl scale`: more or fewer rollout workers for a run that is going on."""

from __future__ import annotations

import typer

from toolrl.app import control, runs
from toolrl.app.cli.app import RUN, RUNS_DIR, TRAIN, app, example, out


@app.command(
    rich_help_panel=TRAIN,
    epilog=example("toolrl scale quickstart-cpu --rollout-workers 2", "toolrl scale runs/math --rollout-workers 16"),
)
def scale(
    run: str = RUN,
    rollout_workers: int = typer.Option(..., "--rollout-workers", min=1, help="How many there are to be."),
    runs_dir: str = RUNS_DIR,
) -> None:
    """Change the number of rollout workers of a live run.

    Workers that join get the latest weights before they take work; those that leave hand their episodes back, to be
    continued by the others. Returns when it is done. A later [cyan]--resume[/cyan] starts with the config's number.
    """
    folder = runs.find(run, runs_dir).resolve()
    console = out()
    done = control.give_order(
        folder, "scale", {"rollout_workers": rollout_workers}, lambda text: console.print(text, markup=False)
    )
    for name, episodes in done["left"].items():
        console.print(f"{name} has left; {episodes} of its episodes go on elsewhere")
    workers = done["workers"]
    console.print(f"run {folder.name} has {len(workers)} rollout workers: {', '.join(workers)}")
