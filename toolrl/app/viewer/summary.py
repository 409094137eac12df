"""The last screen of a run: what was learnt, where the files are, what to try next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from toolrl.app.viewer.step_line import duration
from toolrl.ledger import Ledger
from toolrl.monitors.metrics_log import read_metrics

_WINDOW = 3  # steps at either end of training that are averaged
# In an evaluation's table: key, words, format, better is higher (None: neither).
_EVALUATED: tuple[tuple[str, str, str], ...] = (
    ("accuracy", "accuracy", ".3f"),
    ("reward", "reward", ".3f"),
    ("tool_call_rate", "share of episodes with a call", ".2f"),
    ("calls_per_trajectory", "calls per episode", ".2f"),
    ("format_validity", "healthy turns", ".2f"),
)
_TRAINED: tuple[tuple[str, str, str], ...] = (
    ("reward/mean", "mean reward", ".3f"),
    ("tool/call_rate", "share of episodes with a call", ".2f"),
    ("tool/calls_per_trajectory", "calls per episode", ".2f"),
    ("format/healthy", "healthy turns", ".2f"),
)


def summary(run_dir: str | Path, evaluations: Sequence[Mapping[str, Any]], ledger: Ledger | None = None) -> Group:
    """Before and after on held-out tasks and in training, files, next commands. Fits one screen.

    Args:
        evaluations: tables of `evaluation_table`, the first before training and the last after it; may be empty.
        ledger: the run's final account.
    """
    run, rows = Path(run_dir), read_metrics(run_dir)
    table = Table(title=f"What {run.name} learnt", title_justify="left")
    table.add_column("")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right")
    if len(evaluations) >= 2:
        _held_out(table, evaluations[0], evaluations[-1])
    if rows:
        _in_training(table, rows)
    parts: list[RenderableType] = [table]
    if rows:
        # A resumed run counts on from its checkpoint, so the last row has the whole time.
        parts.append(Text(f"{len(rows)} steps in {duration(rows[-1]['time_s'])}{_account(ledger)}"))
    return Group(*parts, _files(run), _next(run, rows))


def _held_out(table: Table, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    tasks = after["all"].get("tasks", 0)
    table.add_row(Text(f"{tasks:.0f} held-out tasks", style="bold"))
    for key, words, form in _EVALUATED:
        _row(table, words, before["all"].get(key), after["all"].get(key), form)
    families = after.get("by_family", {})
    if len(families) > 1:
        for family, measured in families.items():
            earlier = before.get("by_family", {}).get(family, {}).get("accuracy")
            _row(table, f"accuracy, {family}", earlier, measured.get("accuracy"), ".3f")
    table.add_section()


def _in_training(table: Table, rows: list[dict[str, float]]) -> None:
    table.add_row(Text("training tasks, sampled", style="bold"))
    for key, words, form in _TRAINED:
        values = [row[key] for row in rows if key in row]
        if values:
            window = min(_WINDOW, max(1, len(values) // 2))
            _row(table, words, sum(values[:window]) / window, sum(values[-window:]) / window, form)


def _row(table: Table, words: str, before: float | None, after: float | None, form: str) -> None:
    if before is None or after is None:
        return
    change = after - before
    style = "green" if change > 0 else "red" if change < 0 else ""
    table.add_row(
        f"  {words}", format(before, form), format(after, form), Text(format(change, "+" + form), style=style)
    )


def _account(ledger: Ledger | None) -> str:
    if ledger is None:
        return ""
    law = "the ledger balances" if ledger.balances else "THE LEDGER DOES NOT BALANCE"
    return f"; {ledger.trained} trajectories trained, {ledger.dropped_total} dropped; {law}"


def _files(run: Path) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, words in (
        ("final", "the trained model, Hugging Face format"),
        ("curves.png", "the curves"),
        ("metrics.jsonl", "every metric of every step; `tensorboard --logdir` reads tensorboard/ beside it"),
        ("trajectories", "sampled episodes"),
        ("checkpoints", "to resume from"),
    ):
        if (run / name).exists():
            table.add_row(Text(str(run / name), style="cyan"), words)
    return table


def _next(run: Path, rows: list[dict[str, float]]) -> Table:
    table = Table.grid(padding=(0, 2))
    last = f"{rows[-1]['step']:.0f}" if rows else "1"
    name = run.name if run.parent == Path("runs") else shlex.quote(str(run))  # a run elsewhere is given by its folder
    for number, (command, words) in enumerate(
        (
            (f"toolrl show {name} --step {last}", "read what it writes now"),
            (f"toolrl eval {name}", "measure it again, with more samples"),
            (f"toolrl train {name} --resume loop.steps={int(last) * 2}", "train on"),
        )
    ):
        table.add_row("next:" if number == 0 else "", Text(command, style="bold cyan"), words)
    return table
