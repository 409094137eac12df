"""`toolrl logs`: what a run said."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import typer

from toolrl.app.cli.app import LOOK, RUNS_DIR, app, example
from toolrl.app.cli.status import RUN
from toolrl.errors import UserError

LOOK_EVERY_S = 0.5


@app.command(rich_help_panel=LOOK, epilog=example("toolrl logs quickstart-cpu", "toolrl logs math -f"))
def logs(
    run: str = RUN,
    follow: bool = typer.Option(
        False, "--follow", "-f", help="Go on until the run ends; exit with its code if launched."
    ),
    runs_dir: str = RUNS_DIR,
) -> None:
    """Print what a run said, a line each: steps, checkpoints, alarms."""
    from toolrl.app.launch import submission
    from toolrl.app.run_status import find, is_held

    found = find(run, runs_dir)
    if follow and found.launch is not None:
        raise typer.Exit(submission.follow(found.launch))
    if found.folder is None or not (found.folder / "log.txt").is_file():
        raise UserError(f"run {found.name} has said nothing yet; with --follow its scheduler's log is shown")
    _print(found.folder / "log.txt", lambda: follow and is_held(found.folder or Path()))


def _print(path: Path, goes_on: Callable[[], bool]) -> None:
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            last = not goes_on()  # asked first: what is said until then is read below
            print(file.read(), end="", flush=True)
            if last:
                return
            time.sleep(LOOK_EVERY_S)
