"""`toolrl cold-start`: supervised training on traces, by itself."""

from __future__ import annotations

from dataclasses import replace

import typer

from toolrl import presets
from toolrl.app import runs
from toolrl.app.cli.app import OVERRIDES, TRAIN, Options, app, err, example, need_engines, out


@app.command(
    "cold-start",
    rich_help_panel=TRAIN,
    epilog=example(
        "toolrl cold-start quickstart-cpu",
        "toolrl cold-start quickstart-cpu name=strong cold_start.direct_guess_share=0 cold_start.steps=600",
        "toolrl train quickstart-cpu model.path=runs/quickstart-cpu/cold-start/model cold_start.steps=0",
    ),
)
def cold_start(
    context: typer.Context,
    source: str = typer.Argument(metavar="PRESET_OR_FILE", help="A preset or a YAML file."),
    overrides: list[str] = OVERRIDES,
    runs_dir: str = typer.Option(None, "--runs-dir", help="Where runs live; default: the config's runs_dir."),
) -> None:
    """Write traces of tool use and train on them.

    Programs run in the sandbox; calls, results, retries and answers become traces that the run's own learner learns.
    """
    options: Options = context.obj
    settings = [*(overrides or []), *([f"runs_dir={runs_dir}"] if runs_dir else [])]
    config, warnings = presets.load_with_warnings(source, settings)
    for warning in warnings:
        err().print("[yellow]warning:[/yellow]", str(warning), markup=True)
    need_engines()
    config = runs.with_free_name(replace(config, quiet=config.quiet or options.quiet))
    from toolrl.app.cold_start_run import run_cold_start

    model_dir, report = run_cold_start(config)
    out().print(f"{report}\nmodel: {model_dir}\ntraces: {model_dir.parent / 'traces.parquet'}", markup=False)
