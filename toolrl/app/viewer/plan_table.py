"""A plan as tables: the rates it was made from, and the forecasts side by side."""

from __future__ import annotations

from rich.table import Table

from toolrl.planning import Forecast, Layout, Rates
from toolrl.planning.memory import Fit
from toolrl.planning.rates import flat
from toolrl.planning.split import Split


def rates_table(rates: Rates) -> Table:
    """Every rate by name, in columns."""
    table = Table(title=f"Rates: {rates.source}", title_justify="left", show_header=False)
    cells = [f"{name} = {value:.4g}" for name, value in flat(rates).items()]
    columns = 3
    for _ in range(columns):
        table.add_column()
    for start in range(0, len(cells), columns):
        table.add_row(*cells[start : start + columns])
    return table


def memory_table(memory: Fit) -> Table:
    """What a GPU of the learner and one of an engine hold, in GB."""
    table = Table(
        title=f"Memory of a GPU of {memory.gpu / 1e9:.0f} GB, estimated", title_justify="left", show_header=False
    )
    table.add_column()
    table.add_column(justify="right")
    for name, size in memory.learner.items():
        table.add_row(f"learner: {name}", f"{size / 1e9:.1f}")
    table.add_row("learner: together, of", f"{sum(memory.learner.values()) / 1e9:.0f}, {memory.learner_room / 1e9:.0f}")
    table.add_row("engine: weights", f"{memory.engine_weights / 1e9:.1f}")
    table.add_row("engine: keys and values", f"{memory.cache / 1e9:.1f}")
    table.add_row(f"engine: requests of {memory.request_tokens:,.0f} tokens that fit", f"{memory.holds}")
    return table


def plan_table(layout: Layout, forecast: Forecast, split: Split | None) -> Table:
    """One column for the config, one for the proposal."""
    table = Table(title="Forecast", title_justify="left")
    table.add_column("")
    table.add_column("as configured", justify="right")
    rows = _rows(layout, forecast)
    proposed = _rows(split.layout, split.forecast) if split else []
    if split:
        table.add_column(f"proposed for {split.layout.gpus} GPUs", justify="right")
    for index, (name, value) in enumerate(rows):
        table.add_row(name, value, *([proposed[index][1]] if split else []))
    return table


def _rows(layout: Layout, forecast: Forecast) -> list[tuple[str, str]]:
    limits = ", ".join(
        f"{name} {limit:.3g}" for name, limit in sorted(forecast.limits.items(), key=lambda each: each[1])
    )
    boxes = f"{layout.boxes} a worker, {forecast.boxes:.0f} in use" if layout.boxes else "none"
    return [
        ("engines × GPUs of each", f"{layout.workers} × {layout.tensor_parallel}"),
        ("learner ranks", str(layout.learner_ranks)),
        ("interpreters", boxes),
        ("trajectories/s", f"{forecast.trajectories_per_s:.3g}"),
        ("tokens/s", f"{forecast.tokens_per_s:,.0f}"),
        ("a step, s", f"{forecast.step_s:.3g}"),
        ("learner idle", f"{forecast.learner_idle:.0%}"),
        ("engines idle", f"{forecast.engine_idle:.0%}"),
        ("requests of a busy engine", f"{forecast.engine_requests:.0f}"),
        ("wait for an interpreter, s an episode", f"{forecast.box_wait_s:.2g}"),
        ("staleness, mean and largest", f"{forecast.staleness_mean:.2f}, {forecast.staleness_max}"),
        ("limits of the parts, trajectories/s", limits),
        ("bottleneck", forecast.bottleneck),
    ]
