"""`toolrl stop`: a live run ends in order."""

from __future__ import annotations

import time

import typer

from toolrl.app.cli.app import RUNS_DIR, TRAIN, app, example, out
from toolrl.app.cli.status import RUN
from toolrl.errors import RunError

LOOK_EVERY_S = 0.5


@app.command(rich_help_panel=TRAIN, epilog=example("toolrl stop quickstart-cpu", "toolrl stop math --no-wait"))
def stop(
    run: str = RUN,
    wait: bool = typer.Option(True, help="Return when it has ended; it leaves no process and no container then."),
    deadline_s: float = typer.Option(900.0, "--deadline-s", help="Wait so long at most."),
    runs_dir: str = RUNS_DIR,
) -> None:
    """End a live run in order, here or on the cluster that it was launched on.

    It ends after the step that it is at, with a checkpoint; a paused one ends at once.

    [cyan]toolrl train RUN --resume[/cyan] goes on from there, with other settings if you name some.
    """
    from toolrl.app import control
    from toolrl.app.launch import submission
    from toolrl.app.run_status import find, is_held, resuming

    found = find(run, runs_dir)
    if found.launch is not None:
        submission.stop(found.launch)
        said = f"run {found.name} was told to stop by {found.launch.target}; `{resuming(found)}` goes on from there"
        out().print(said, markup=False, soft_wrap=True)
        return
    assert found.folder is not None
    was_paused = control.give_order(found.folder, "stop", {})
    when = "now" if was_paused else "after the step that it is at"
    out().print(f"run {found.name} stops {when}; `toolrl train {found.name} --resume` goes on from there", markup=False)
    ends = time.monotonic() + deadline_s
    while wait and is_held(found.folder):
        if time.monotonic() > ends:
            raise RunError(
                f"run {found.name} has not ended in {deadline_s:g} s; `toolrl logs {found.name}` says where it is"
            )
        time.sleep(LOOK_EVERY_S)
    if wait:
        out().print(f"run {found.name} has ended", markup=False)
