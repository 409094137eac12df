"""`toolrl explain`: what the guards of a run saw and did."""

from __future__ import annotations

import json

import typer
from rich.markup import escape
from rich.table import Table

from toolrl.app import runs
from toolrl.app.cli.app import LOOK, RUN, RUNS_DIR, app, example, out

_COLOURS = {"seen": "red", "would": "red", "done": "yellow", "came_of_it": "cyan", "ended": "green"}
_WORDS = {"came_of_it": "came of it", "would": "would see"}


@app.command(
    rich_help_panel=LOOK,
    epilog=example(
        "toolrl explain quickstart-cpu",
        "toolrl explain quickstart-cpu --preset strict",
        "toolrl explain runs/quickstart-cpu --json",
    ),
)
def explain(
    run: str = RUN,
    preset: str = typer.Option(None, "--preset", help="What this preset of guards would have seen instead."),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
    runs_dir: str = RUNS_DIR,
) -> None:
    """Tell what a run's guards saw, what they did, and what came of it.

    In the order in which it happened; then the rules that came near without
    firing, and those whose metric was never there. Works while the run goes on.
    """
    from toolrl.app.explain import explain as explained_run
    from toolrl.app.explain import near_text, summary

    found = explained_run(runs.find(run, runs_dir), preset)
    if as_json:
        print(json.dumps(found.as_dict(), indent=1))
        return
    console = out()
    console.print(f"[bold]{escape(summary(found))}[/bold]")
    if found.told:
        story = Table("step", "rule", "", "what", show_lines=False)
        for each in found.told:
            kind = f"[{_COLOURS[each.kind]}]{_WORDS.get(each.kind, each.kind)}[/]"
            story.add_row(str(each.step), escape(each.rule), kind, escape(each.text))
        console.print(story)
    if found.near:
        near = Table("came near", "metric", "step", "level", "limit", "how near")
        for close in found.near:
            numbers = (str(close.step), f"{close.level:.3g}", f"{close.limit:.3g}")
            near.add_row(escape(close.rule.name), close.rule.metric, *numbers, near_text(close))
        console.print(near)
    for silent in found.blind:
        console.print(f"{silent.rule.name} saw nothing: {silent.rule.metric} is not measured in this run", markup=False)
