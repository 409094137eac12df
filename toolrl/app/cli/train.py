"""`toolrl train`: the whole loop, or with `--dry-run` what it would do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from toolrl import placement, presets
from toolrl.app import ending, machine, runs
from toolrl.app.cli.app import OVERRIDES, TRAIN, Options, app, err, example, need_engines, out
from toolrl.app.viewer.placement_table import placement_table
from toolrl.config import RunConfig
from toolrl.errors import Problem


@app.command(
    rich_help_panel=TRAIN,
    epilog=example(
        "toolrl train quickstart-cpu",
        "toolrl train single-gpu-1.5b loop.steps=50 learner.learning_rate=2e-6",
        "toolrl train math-4b recipe=dapo learner.learning_rate=2e-6",
        "toolrl train my-run.yaml tools.0.failure_rate=0.2 --dry-run",
        "toolrl train quickstart-cpu --resume",
    ),
)
def train(
    context: typer.Context,
    source: str = typer.Argument(metavar="PRESET_OR_FILE", help="A preset, a YAML file, or with --resume a run."),
    overrides: list[str] = OVERRIDES,
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Print the resolved config and the placement; start nothing."
    ),
    resume: bool = typer.Option(False, "--resume", help="Continue a run from its last checkpoint."),
    or_resume: bool = typer.Option(
        False, "--or-resume", help="Begin the run of this very name, or continue it where it has begun: for launchers."
    ),
    runs_dir: str = typer.Option(None, "--runs-dir", help="Where runs live; default: the config's runs_dir."),
) -> None:
    """Train a model: rollouts with tools, rewards, updates.

    Every setting is a [cyan]key=value[/cyan] away; [cyan]toolrl config keys[/cyan] lists them. A new run never touches
    an old one's folder: when the name is taken it becomes name-2, name-3, ….
    """
    options: Options = context.obj
    settings = overrides or []
    config, warnings = _resumed(source, settings, runs_dir or "runs") if resume else _fresh(source, settings, runs_dir)
    if options.quiet:
        config = replace(config, quiet=True)
    for warning in warnings:
        err().print("[yellow]warning:[/yellow]", str(warning), markup=True)
    if dry_run:
        show_plan(config)
        return
    need_engines()
    resume = resume or (or_resume and (Path(config.runs_dir) / config.name / runs.CONFIG_FILE).is_file())
    if not resume and not or_resume:
        taken = config.name
        config = runs.with_free_name(config)
        if config.name != taken:
            out().print(f"run {taken} exists; this one is [bold]{config.name}[/bold]")
    with ending.at_once():
        from toolrl.app.train import train as run_training

        run_training(config, resume=resume)


def _fresh(source: str, overrides: list[str], runs_dir: str | None) -> tuple[RunConfig, list[Problem]]:
    return presets.load_with_warnings(source, [*overrides, *([f"runs_dir={runs_dir}"] if runs_dir else [])])


def _resumed(source: str, overrides: list[str], runs_dir: str) -> tuple[RunConfig, list[Problem]]:
    """The stored settings of an existing run, with overrides."""
    folder = runs.find_or_newest(source, runs_dir)
    config, warnings = presets.load_with_warnings(str(folder / runs.CONFIG_FILE), overrides)
    out().print(f"continuing {folder}")
    return replace(config, name=folder.resolve().name, runs_dir=str(folder.resolve().parent)), warnings


def show_plan(config: RunConfig) -> None:
    """Prints the config, the placement table, and whether this machine has what it takes."""
    console = out()
    console.print(presets.to_yaml(config), markup=False)
    available = machine.resources()
    plan = placement.needed(config, placement.resolve_device(config, available))
    console.print(placement_table(plan))
    if config.placement.ray_address:
        console.print(f"to be placed on the Ray cluster at {config.placement.ray_address}; checked when it starts")
        return
    lacking = [str(fault) for fault in placement.device_faults(config, plan.device)] + placement.missing(
        plan, available
    )
    if not lacking:
        console.print("[green]this machine has what it takes[/green]")
    for line in lacking:
        console.print("[yellow]this machine lacks[/yellow]", line)
