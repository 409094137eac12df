"""`toolrl launch`: a config on a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from toolrl import presets
from toolrl.app import runs
from toolrl.app.cli.app import OVERRIDES, TRAIN, app, example, out


@app.command(
    rich_help_panel=TRAIN,
    epilog=example(
        "toolrl launch math-4b --target kuberay --dry-run",
        "toolrl launch my-cluster.yaml --target slurm",
        "toolrl launch my-cluster.yaml --target compose --no-follow",
        "toolrl launch my-run --target compose --resume",
        "toolrl launch my-cluster.yaml --target ray cluster.job_address=http://127.0.0.1:8265",
        "toolrl launch my-cluster.yaml --target ray --dry-run --out my-cluster  # then: cd my-cluster; ray up ray-cluster.yaml",
    ),
)
def launch(
    source: str = typer.Argument(metavar="PRESET_OR_FILE", help="A preset, a YAML file, or with --resume a run."),
    overrides: list[str] = OVERRIDES,
    target: str = typer.Option(..., "--target", "-t", help="kuberay, slurm, compose or ray."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Render the files and say what would be run; submit nothing."
    ),
    out_dir: str = typer.Option(
        None, "--out", metavar="FOLDER", help="With --dry-run: write the files, and Ray's token, there."
    ),
    follow: bool = typer.Option(True, help="Print the run's log until it ends; exit with its code."),
    resume: bool = typer.Option(False, "--resume", help="Go on with a run that was launched, at its last checkpoint."),
    runs_dir: str = typer.Option("runs", "--runs-dir", help="With --resume: where the run lies."),
) -> None:
    """Run a config on a cluster: Kubernetes (KubeRay), Slurm, Compose, or a Ray cluster that is there.

    One [cyan]cluster:[/cyan] section of the config describes the nodes for all of them. The files, Ray's token and the id
    lie in [cyan]RUNS_DIR/launches/NAME/[/cyan]; [cyan]toolrl status[/cyan], [cyan]logs[/cyan] and [cyan]stop[/cyan] find the
    run by them.
    """
    from toolrl.app.launch import render, submission
    from toolrl.app.launch.target import RUN_FILE

    left = Path(runs_dir) / submission.FOLDER / source / RUN_FILE
    if resume and left.is_file() and not (Path(runs_dir) / source).is_dir():
        config = presets.load(str(left), overrides or [])  # the run's folder is seen by the cluster alone
    elif resume:
        place = runs.find(source, runs_dir)
        config = replace(presets.load(str(place / runs.CONFIG_FILE), overrides or []), name=place.resolve().name)
    else:
        config = presets.load(source, overrides or [])
    if not dry_run and not resume:
        config = submission.with_free_name(config, target)
    rendered = render(config, target)
    console = out()
    if dry_run:
        if out_dir:
            for path in submission.write(rendered, config, Path(out_dir)):
                console.print(f"wrote {path}", markup=False)
        else:
            for name, text in rendered.files.items():
                console.rule(name)
                print(text)
        console.print("would run: " + " ".join(rendered.submit), markup=False)
        return
    folder = submission.folder_of(config, target)
    submitted = submission.submit(rendered, config, target, folder)
    console.print(
        f"run [bold]{config.name}[/bold] is submitted to {target}{f' as {submitted.id}' if submitted.id else ''}"
    )
    if follow:
        raise typer.Exit(submission.follow(submitted))
