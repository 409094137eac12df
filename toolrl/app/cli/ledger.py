"""`toolrl ledger`: the account of a run's samples."""

from __future__ import annotations

import json

import typer

from toolrl.app import runs
from toolrl.app.cli.app import LOOK, RUN, RUNS_DIR, app, example, out
from toolrl.app.viewer.ledger_table import ledger_table
from toolrl.errors import UserError


@app.command(
    rich_help_panel=LOOK,
    epilog=example("toolrl ledger quickstart-cpu", "toolrl ledger runs/quickstart-cpu --json"),
)
def ledger(
    run: str = RUN,
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
    runs_dir: str = RUNS_DIR,
) -> None:
    """Account for every sample of a run.

    At any moment: issued = trained + dropped + ready + leased + generating.
    Exit code 1 when the account does not balance. Works while the run goes on.
    """
    path = runs.find(run, runs_dir) / "ledger.sqlite"
    if not path.is_file():
        raise UserError(f"no ledger yet: {path} is written when the rollouts start")
    from actors.replay import read_ledger

    account = read_ledger(path)
    if as_json:
        print(json.dumps(account.as_dict(), indent=1))
    else:
        out().print(ledger_table(account))
    if not account.balances:
        raise typer.Exit(1)
