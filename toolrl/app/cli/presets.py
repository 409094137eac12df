"""`toolrl presets`: the ready-made configs, the recipes that lie over them, and the guards that watch them."""

from __future__ import annotations

import typer
from rich.table import Table

from toolrl import presets as preset_files
from toolrl.app.cli.app import TRADE, app, example, out
from toolrl.guards import presets as guards
from toolrl.presets import recipes


@app.command(
    rich_help_panel=TRADE,
    epilog=example(
        "toolrl presets",
        "toolrl presets quickstart-cpu > my-run.yaml",
        "toolrl presets dapo",
        "toolrl train math-4b recipe=dapo guards.preset=standard",
    ),
)
def presets(name: str = typer.Argument(None, metavar="[NAME]", help="Print the file of this name.")) -> None:
    """List presets (model, tasks, machine), recipes (method) and guards (against collapse), or print one.

    A recipe lies over a preset, guards watch it: [cyan]recipe=NAME[/cyan] and [cyan]guards.preset=NAME[/cyan]
    beside the other settings.
    """
    if name:
        kind = next((kind for kind in (recipes, guards) if name in kind.names()), preset_files)
        print(kind.text(name), end="")
        return
    for title, known, describe in (
        ("preset", preset_files.names(), preset_files.description),
        ("recipe", recipes.names(), recipes.description),
        ("guards", guards.names(), guards.description),
    ):
        table = Table(title, "what it is")
        for each in known:
            table.add_row(each, describe(each))
        out().print(table)
