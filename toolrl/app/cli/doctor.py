"""`toolrl doctor`: can this machine run it, and what to do if not."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.table import Table
from rich.text import Text

from toolrl.app.cli.app import TRADE, app, example, out

_STYLE = {"ok": "green", "limited": "yellow", "missing": "red"}


@app.command(rich_help_panel=TRADE, epilog=example("toolrl doctor", "toolrl doctor --json"))
def doctor(as_json: bool = typer.Option(False, "--json", help="As JSON.")) -> None:
    """Say what this machine can run, and what is missing.

    Each component: what was found, what it means, what to do. Exit code 0 when the quickstart can run, 1 otherwise.
    """
    from toolrl.app.doctor import can_run_quickstart, examine

    findings = examine()
    able = can_run_quickstart(findings)
    if as_json:
        print(json.dumps({"quickstart": able, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        table = Table("component", "found", "what it means", "what to do")
        for finding in findings:
            state = Text(finding.found, style=_STYLE[finding.state])
            table.add_row(finding.component, state, finding.meaning, finding.remedy)
        out().print(table)
        if able:
            out().print("[green]The quickstart can run:[/green] toolrl train quickstart-cpu")
        else:
            out().print("[red]The quickstart cannot run here yet; see the red rows.[/red]")
    if not able:
        raise typer.Exit(1)
