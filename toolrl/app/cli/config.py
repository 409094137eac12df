"""`toolrl config`: what can be set, and what a config comes to."""

from __future__ import annotations

import typer
from rich.table import Table

from toolrl import config_reference, presets
from toolrl.app.cli.app import OVERRIDES, TRADE, app, err, example, out
from toolrl.errors import UserError

config = typer.Typer(no_args_is_help=True, help="List every setting, or print a resolved config.")
app.add_typer(config, name="config", rich_help_panel=TRADE, epilog=example("toolrl config keys learner"))


@config.command(epilog=example("toolrl config keys", "toolrl config keys staleness"))
def keys(
    part: str = typer.Argument("", metavar="[PART]", help="Only keys or meanings that hold this text."),
    markdown: bool = typer.Option(False, "--markdown", help="As the table of docs/config.md."),
) -> None:
    """Every key with its type, default and meaning."""
    if markdown:
        print(config_reference.markdown(), end="")
        return
    found = [key for key in config_reference.all_keys() if part.lower() in f"{key.name} {key.meaning}".lower()]
    if not found:
        raise UserError(f"no setting holds {part!r}; `toolrl config keys` lists them all")
    table = Table("key", "type", "default", "meaning")
    for key in found:
        table.add_row(key.name, key.kind, key.default, key.meaning)
    out().print(table, markup=False)


@config.command(epilog=example("toolrl config show math-4b rollout.workers=6"))
def show(
    source: str = typer.Argument(metavar="PRESET_OR_FILE"),
    overrides: list[str] = OVERRIDES,
) -> None:
    """The checked, resolved config as YAML, defaults included."""
    resolved, warnings = presets.load_with_warnings(source, overrides or [])
    for warning in warnings:
        err().print("warning:", str(warning), markup=False)
    print(presets.to_yaml(resolved), end="")
