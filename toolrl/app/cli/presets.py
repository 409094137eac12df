"""`toolrl presets`: the ready-made configs."""

from __future__ import annotations

import typer
from rich.table import Table

from toolrl import presets as preset_files
from toolrl.app.cli.app import TRADE, app, example, out


@app.command(
    rich_help_panel=TRADE,
    epilog=example("toolrl presets", "toolrl presets quickstart-cpu > my-run.yaml"),
)
def presets(name: str = typer.Argument(None, metavar="[NAME]", help="Print this preset's file.")) -> None:
    """List the presets, or print one to start from."""
    if name:
        print(preset_files.text(name), end="")
        return
    table = Table("preset", "what it is")
    for known in preset_files.names():
        table.add_row(known, preset_files.description(known))
    out().print(table)
