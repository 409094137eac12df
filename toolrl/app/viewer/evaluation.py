"""An evaluation as a table: a column for all tasks and one for each family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

_WHOLE = ("tasks", "samples", "missing")


def evaluation_view(table: Mapping[str, Any]) -> Table:
    """Of what `toolrl.app.evaluation_table` measured."""
    columns = {"all": table["all"], **table["by_family"]}
    shown = Table(title=f"{table['all']['tasks']} held-out tasks", title_justify="left")
    shown.add_column("measure")
    for name in columns:
        shown.add_column(name, justify="right")
    for measure in table["all"]:
        cells = [_cell(measure, measured.get(measure)) for measured in columns.values()]
        shown.add_row(measure.replace("_", " "), *cells)
    return shown


def _cell(measure: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if measure in _WHOLE else f"{value:.3f}"
