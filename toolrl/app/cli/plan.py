"""`toolrl plan`: what a config would do, and how its GPUs are best divided, before anything is rented."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import typer
import yaml

from toolrl import presets
from toolrl.app import runs
from toolrl.app.cli.app import OVERRIDES, RUNS_DIR, TRADE, app, example, need_engines, out
from toolrl.app.viewer.plan_table import memory_table, plan_table, rates_table
from toolrl.config import RunConfig
from toolrl.errors import UserError
from toolrl.planning import Layout, Rates, best_split, simulate
from toolrl.planning.hardware import GPUS, estimated, least_learner_ranks
from toolrl.planning.memory import fit
from toolrl.planning.rates import changed, flat

RATE = typer.Option(None, "--rate", metavar="NAME=VALUE", help="One rate; it comes over all others.")


@app.command(
    rich_help_panel=TRADE,
    epilog=example(
        "toolrl plan math-4b --gpu h100",
        "toolrl plan math-4b --gpu h100 --gpus 64 --rate tool.mean_s=2 --rate tool.p99_s=20",
        "toolrl plan quickstart-cpu --from runs/quickstart-cpu buffer.max_staleness=2",
        "toolrl plan my-run.yaml --rates rates.yaml --json",
    ),
)
def plan(
    source: str = typer.Argument(metavar="PRESET_OR_FILE", help="A preset or a YAML file."),
    overrides: list[str] = OVERRIDES,
    gpu: str = typer.Option(None, "--gpu", metavar="NAME", help=f"Estimate rates for: {', '.join(GPUS)}."),
    billions: float = typer.Option(None, "--billions", min=0.001, help="Parameters (10⁹) where the name does not say."),
    from_run: str = typer.Option(None, "--from", metavar="RUN", help="Rates as an earlier run met them."),
    measure: bool = typer.Option(False, "--measure", help="Start the engine here and measure it."),
    rates_file: str = typer.Option(None, "--rates", metavar="FILE", help="A YAML file of rates; over those above."),
    rate: list[str] = RATE,
    gpus: int = typer.Option(None, "--gpus", min=2, help="So many GPUs: also propose how to divide them."),
    steps: int = typer.Option(20, "--steps", min=1, help="Simulated steps."),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
    runs_dir: str = RUNS_DIR,
) -> None:
    """Predict throughput, idle shares, staleness and the bottleneck of a config by simulation, and whether it fits.

    Rates come from a GPU's data sheet ([cyan]--gpu[/cyan], an estimate, of memory too), from a run ([cyan]--from[/cyan]), from a
    measurement, or from you; the table says which were used. With [cyan]--gpus[/cyan] it looks for a better split between
    engines, learner and interpreters.
    """
    config = presets.load(source, overrides or [])
    rates = Rates()
    if not (gpu or from_run or measure or rates_file or rate):
        raise UserError("a plan needs rates: --gpu NAME, --from RUN, --measure, --rates FILE or --rate NAME=VALUE")
    if gpu:
        rates = estimated(config, gpu, model_billions=billions)
    rates = _measured(config, rates, from_run, measure, runs_dir)
    if rates_file:
        rates = changed(rates, _nested(Path(rates_file)), f"{rates.source}; {rates_file}")
    if rate:
        rates = changed(rates, dict(map(_assignment, rate)), f"{rates.source}; --rate")
    layout = Layout.of(config)
    memory = fit(config, gpu, model_billions=billions) if gpu else None
    if memory:  # what an engine has no room for waits in its queue
        layout = dataclasses.replace(layout, engine_requests=min(layout.engine_requests, memory.holds))
    forecast = simulate(rates, layout, steps=steps, seed=config.seed)
    split = None
    if gpus:
        least = least_learner_ranks(config, gpu, model_billions=billions) if gpu else 1
        try:
            rows = config.learner.sequence_parallel
            split = best_split(rates, layout, gpus, least_ranks=least, ranks_of_a_row=rows, seed=config.seed)
        except ValueError as error:
            raise UserError(f"--gpus {gpus}: {error}") from None
    if as_json:
        found: dict[str, Any] = {"rates": {"source": rates.source, **flat(rates)}, "forecast": forecast.as_dict()}
        if memory:
            found["memory"] = {**dataclasses.asdict(memory), "holds": memory.holds, "problems": memory.problems(config)}
        if split:
            found["split"] = {"layout": dataclasses.asdict(split.layout), "forecast": split.forecast.as_dict()}
        print(json.dumps(found, indent=1))
        return
    console = out()
    console.print(rates_table(rates))
    if memory:
        console.print(memory_table(memory))
        for problem in memory.problems(config):
            console.print("[yellow]memory:[/yellow]", problem)
    console.print(plan_table(layout, forecast, split))


def _measured(config: RunConfig, rates: Rates, from_run: str | None, measure: bool, runs_dir: str) -> Rates:
    from toolrl.app.run_rates import run_rates, with_engine

    if from_run:
        rates = run_rates(runs.find(from_run, runs_dir))
    if measure:
        need_engines()
        from toolrl.app.engine_rates import measured_engine

        rates = with_engine(rates, measured_engine(config))
    return rates


def _nested(path: Path) -> dict[str, Any]:
    """`engine: {step_s: …}` of a file as {"engine.step_s": …}."""
    try:
        loaded = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"--rates {path}: cannot be read: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(part, dict) for part in loaded.values()):
        raise UserError(f"--rates {path}: must hold parts with rates, e.g. `engine: {{step_s: 0.02}}`")
    return {f"{name}.{key}": value for name, part in loaded.items() for key, value in part.items()}


def _assignment(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise UserError(f"--rate {text}: must be NAME=NUMBER, e.g. engine.step_s=0.02") from None
