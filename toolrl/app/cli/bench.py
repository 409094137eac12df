"""`toolrl bench`: the speed measurements of benchmarks/, as a table and as JSON.

A benchmark is a file `benchmarks/NAME.py` with `run() -> dict`; its docstring's first line says what it measures. It has
those of this command's options that its `run` has parameters for.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

import toolrl
from toolrl.app import machine
from toolrl.app.cli.app import TRADE, app, example, out
from toolrl.errors import UserError
from toolrl.registry import nearest


@app.command(
    rich_help_panel=TRADE,
    epilog=example("toolrl bench", "toolrl bench learner --quick", "toolrl bench all --out bench-results"),
)
def bench(
    name: str = typer.Argument(None, metavar="[NAME]", help="A benchmark, or `all`; without it they are listed."),
    out_dir: str = typer.Option("bench-results", "--out", help="Folder of the JSON files."),
    quick: bool = typer.Option(False, "--quick", help="Fewer cases and rounds, where a benchmark has that."),
    trl: str = typer.Option(
        None,
        envvar="TOOLRL_TRL_PYTHON",
        metavar="PYTHON",
        help="Python of an environment with TRL, for what compares with it; without it, one is made once.",
    ),
) -> None:
    """Measure a part's speed against its limit or a peer."""
    found = benchmarks()
    if name is None:
        listing = Table("benchmark", "what it measures")
        for known, path in found.items():
            listing.add_row(known, _description(path))
        out().print(listing)
        return
    if name != "all" and name not in found:
        raise UserError(f"unknown benchmark {name!r}{nearest(name, [*found, 'all'])}")
    options = {"quick": quick, "trl": trl}
    for chosen in found if name == "all" else [name]:
        parameters = _parameters(found[chosen])
        if name != "all" and quick and "quick" not in parameters:
            raise UserError(f"benchmark {chosen!r} has no --quick")
        started = time.time()
        result = _load(found[chosen]).run(**{key: value for key, value in options.items() if key in parameters})
        record = {
            "benchmark": chosen,
            "seconds": round(time.time() - started, 3),
            "cpus": machine.cpus(),
            "result": result,
        }
        target = Path(out_dir) / f"{chosen}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(record, indent=1, default=str) + "\n")
        out().print(_table(chosen, result))
        out().print(f"written to {target}")


def benchmarks() -> dict[str, Path]:
    """Name -> file of every benchmark in ./benchmarks or beside the package. Raises UserError where there are none."""
    folders = [Path("benchmarks"), Path(toolrl.__file__).parents[1] / "benchmarks"]
    for folder in folders:
        files = {path.stem.replace("_", "-"): path for path in sorted(folder.glob("*.py")) if _has_run(path)}
        if files:
            return files
    raise UserError(
        "no benchmarks: no file with `run()` in ./benchmarks; they are part of the source tree, so run this in a checkout"
    )


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _has_run(path: Path) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in _parsed(path).body)


def _parameters(path: Path) -> set[str]:
    """Of the benchmark's `run`."""
    runs = [node for node in _parsed(path).body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    return {argument.arg for node in runs for argument in [*node.args.args, *node.args.kwonlyargs]}


def _description(path: Path) -> str:
    return (ast.get_docstring(_parsed(path)) or "").partition("\n")[0]


def _load(path: Path) -> Any:
    package = sys.modules.setdefault("benchmarks", types.ModuleType("benchmarks"))
    # What a benchmark imports from beside it is found there first.
    package.__path__ = [str(path.parent), *getattr(package, "__path__", [])]
    spec = importlib.util.spec_from_file_location(f"benchmarks.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def _table(name: str, result: dict[str, Any]) -> Table:
    """Scalars as rows; a list of dicts as a table of its own columns."""
    rows = next(
        (value for value in result.values() if isinstance(value, list) and value and isinstance(value[0], dict)), None
    )
    if rows is not None:
        table = Table(*map(str, rows[0]), title=name, title_justify="left")
        for row in rows:
            table.add_row(*(_number(row.get(column, "")) for column in rows[0]))
        return table
    table = Table("measure", "value", title=name, title_justify="left")
    for key, value in _flat(result):
        table.add_row(key, _number(value))
    return table


def _flat(result: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in result.items():
        rows.extend(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)])
    return rows


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
