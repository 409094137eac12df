"""The placement of a run as a table."""

from __future__ import annotations

from rich.table import Table

from toolrl.placement import Placement


def placement_table(plan: Placement) -> Table:
    """One row a part, totals at the end."""
    on_gpu = plan.device == "cuda"
    table = Table(title=f"Placement: {plan.mode}, {plan.device}", title_justify="left")
    table.add_column("part")
    for name in ("count", "CPUs each", "GPUs each", "host GiB"):
        table.add_column(name, justify="right")
    if on_gpu:
        table.add_column("GPU memory")
    table.add_column("what")
    for part in plan.parts:
        cells = [part.name, str(part.count), f"{part.cpus:g}", f"{part.gpus:g}", f"{part.count * part.memory_gib:.1f}"]
        table.add_row(*cells, *([part.gpu_memory] if on_gpu else []), part.note)
    total = plan.total()
    table.add_section()
    cells = ["all", "", f"{total['CPU']:g}", f"{total['GPU']:g}", f"{plan.memory_gib:.1f}"]
    table.add_row(*cells, *([""] if on_gpu else []), "estimates of memory", style="bold")
    return table
