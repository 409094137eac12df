"""In- and out-of-distribution in one table: a row for each variant, its difference from the run's own beside each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from toolrl.app.ood_table import MEASURES


def ood_view(compared: Mapping[str, Any]) -> Group:
    """Of what `toolrl.app.ood_table` put together."""
    table = Table(title="Out of distribution (difference from in distribution)", title_justify="left")
    table.add_column("")
    table.add_column("tasks", justify="right")
    for words in MEASURES.values():
        table.add_column(words, justify="right")
    own = compared["in_distribution"]
    table.add_row("in distribution", str(own["tasks"]), *(f"{own[measure]:.3f}" for measure in MEASURES))
    table.add_section()
    for name, row in compared["variants"].items():
        table.add_row(name, str(row["tasks"]), *(_cell(row[measure]) for measure in MEASURES))
    for name in compared["left_out"]:
        table.add_row(name, "–", *("left out" if measure == "accuracy" else "–" for measure in MEASURES))
    notes: list[RenderableType] = [Text(f"{name}: {row['what']}") for name, row in compared["variants"].items()]
    notes += [Text(f"{name} was left out: {why}", style="yellow") for name, why in compared["left_out"].items()]
    return Group(table, *notes)


def _cell(measured: Mapping[str, float]) -> Text:
    difference = measured["difference"]
    style = "red" if difference < -0.005 else ""
    return Text.assemble(f"{measured['value']:.3f} ", (f"({difference:+.3f})", style))
