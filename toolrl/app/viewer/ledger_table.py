"""The account of a run's samples as a table, with the conservation law as its last line."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from toolrl.ledger import Ledger


def ledger_table(ledger: Ledger) -> Group:
    """The law's terms, what they are made of, and whether it holds."""
    table = Table("samples", "count", "of these", title="Ledger", title_justify="left")
    table.columns[1].justify = "right"
    table.add_row("issued", str(ledger.issued), "")
    table.add_section()
    table.add_row("trained", str(ledger.trained), "")
    table.add_row("dropped", str(ledger.dropped_total), _parts(ledger.dropped))
    table.add_row("ready", str(ledger.ready), "")
    table.add_row("leased", str(ledger.leased), "")
    table.add_row("generating", str(ledger.generating), _parts(ledger.generating_parts))
    accounted = ledger.trained + ledger.dropped_total + ledger.ready + ledger.leased + ledger.generating
    law = f"{ledger.issued} issued = {accounted} trained + dropped + ready + leased + generating"
    verdict = Text(f"balances: {law}", style="green")
    if not ledger.balances:
        words = f"DOES NOT BALANCE: {law.replace('=', '≠')}; the account is damaged: keep ledger.sqlite and report it"
        verdict = Text(words, style="bold red")
    details = [Text(f"{name}: {_parts(counts)}") for name, counts in ledger.details.items() if _parts(counts)]
    return Group(table, verdict, *details)


def _parts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)
