"""`toolrl sandbox`: build, check and look after the code interpreter. Thin over the package `sandbox`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from toolrl.app.cli.app import TRADE, app, example, out
from toolrl.config import SandboxSettings
from toolrl.errors import UserError

if TYPE_CHECKING:
    from sandbox import RunResult, SandboxConfig
    from sandbox.measure import Figure
    from sandbox.selfcheck import Finding

TAG = SandboxSettings().image

sandbox = typer.Typer(no_args_is_help=True, help="Build, check and look after the code interpreter.")
app.add_typer(sandbox, name="sandbox", rich_help_panel=TRADE, epilog=example("toolrl sandbox build"))


class How(StrEnum):
    auto = "auto"
    dockerfile = "dockerfile"
    debootstrap = "debootstrap"


class Backend(StrEnum):
    auto = "auto"
    docker = "docker"
    process = "process"


_HOW = typer.Option(How.auto, "--how", help="From a slim Python base, or from Debian packages (no registry).")
_WITH = typer.Option([], "--with", metavar="PACKAGE", help="Also install matplotlib, pandas or scipy; may be repeated.")
_FILE = typer.Option(None, "--file", exists=True, dir_okay=False, help="Read the cell from a file.")
_BACKEND = typer.Option(Backend.auto, "--backend", help="Where the code runs; auto: Docker if it can be used.")
_RUNTIME = typer.Option("runc", "--runtime", help="Docker runtime: runc, or runsc where gVisor is installed.")
_STYLES = {"kept": "green", "BROKEN": "red", "not promised": "dim"}


@sandbox.command(epilog=example("toolrl sandbox build", "toolrl sandbox build --how debootstrap"))
def build(
    tag: str = typer.Option(TAG, "--tag", help="Name of the image."),
    how: How = _HOW,
    extras: list[str] = _WITH,
) -> None:
    """Build the image of the Docker backend."""
    from docker.errors import DockerException

    from sandbox import image
    from sandbox.image.builder import BuildFailed

    started = time.monotonic()
    try:
        built = image.build(tag, how.value, extras)
    except (BuildFailed, DockerException) as error:
        raise UserError(f"the image {tag} was not built: {error}") from error
    out().print(f"built {tag} ({built[:19]}) in {time.monotonic() - started:.0f} s; next: toolrl sandbox check")


@sandbox.command(epilog=example("toolrl sandbox check", "toolrl sandbox check --backend process"))
def check(backend: Backend = _BACKEND, runtime: str = _RUNTIME) -> None:
    """Check every promise of docs/sandbox.md on this machine. Exit code 1 when one is broken."""
    from sandbox import SandboxConfig, available_backend

    config = SandboxConfig(backend=backend.value, runtime=runtime, run=f"check-{os.getpid()}")
    with _told():
        _, why = available_backend(config)
        findings = asyncio.run(_findings(config))
    table = Table("promise", "result", "measured")
    for finding in findings:
        table.add_row(finding.promise, Text(finding.outcome, style=_STYLES[finding.outcome]), Text(finding.detail))
    out().print(table)
    broken = sum(finding.outcome == "BROKEN" for finding in findings)
    kept = sum(finding.outcome == "kept" for finding in findings)
    out().print(f"{why}: {kept} promises kept, {broken} broken", markup=False)
    if broken:
        raise typer.Exit(1)


@sandbox.command(epilog=example("toolrl sandbox run 'print(6 * 7)'", "toolrl sandbox run --file cell.py --timeout 30"))
def run(
    code: str = typer.Argument(None, metavar="[CODE]", help="A cell; `-` reads it from standard input."),
    file: Path = _FILE,
    timeout_s: float = typer.Option(10.0, "--timeout", min=0.1, help="Seconds."),
    backend: Backend = _BACKEND,
) -> None:
    """Run one cell in a fresh interpreter and print what a model would get back. Exit code 1 unless it went well."""
    if (code is None) == (file is None):
        raise UserError("give either the code or --file, e.g. toolrl sandbox run 'print(6 * 7)'")
    source = file.read_text() if file is not None else sys.stdin.read() if code == "-" else code
    from sandbox import SandboxConfig

    with _told():
        config = SandboxConfig(backend=backend.value, min_sessions=1, max_sessions=1, run="cli")
        result = asyncio.run(_run(config, source, timeout_s))
    sys.stdout.write(result.stdout)
    if result.value is not None:
        print(result.value)
    sys.stderr.write(result.stderr)
    told = f"{result.status}, {result.wall_s * 1000:.1f} ms" + (f": {result.note}" if result.note else "")
    print(told, file=sys.stderr)
    if result.status != "ok":
        raise typer.Exit(1)


@sandbox.command(epilog=example("toolrl sandbox bench", "toolrl sandbox bench --jupyter ~/notebooks/bin/python"))
def bench(
    backend: Backend = _BACKEND,
    runtime: str = _RUNTIME,
    jupyter: str = typer.Option(
        None, "--jupyter", metavar="PYTHON", help="A Python with jupyter_client and ipykernel, to compare with."
    ),
    boxes: str = typer.Option("1,8,16,64", "--boxes", help="Numbers of boxes to load at once."),
) -> None:
    """Measure round trip, creation and load against a bare echo, `docker exec` and a Jupyter kernel. About a minute."""
    from sandbox import SandboxConfig
    from sandbox.measure import on_the_loop_of_actors

    if not all(count.strip().isdigit() and int(count) > 0 for count in boxes.split(",")):
        raise UserError(f"--boxes is {boxes!r}; give numbers above 0 with commas between, e.g. --boxes 1,8,16")
    counts = tuple(int(count) for count in boxes.split(","))
    config = SandboxConfig(backend=backend.value, runtime=runtime, run=f"bench-{os.getpid()}")
    with _told():
        figures = on_the_loop_of_actors(_figures(config, counts, jupyter))
    table = Table("what", "p50 or value", "p99", "unit", "target", "met")
    for figure in figures:
        p99 = "" if figure.p99 is None else f"{figure.p99:.4g}"
        table.add_row(figure.what, f"{figure.value:.4g}", p99, figure.unit, figure.target, figure.met)
    out().print(table)


@sandbox.command(epilog=example("toolrl sandbox ps", "toolrl sandbox ps --run quickstart-cpu"))
def ps(run: str = typer.Option(None, "--run", help="Only of this run.")) -> None:
    """List the sandbox's containers, whoever made them."""
    from sandbox.reaper import list_boxes

    with _told():
        boxes = list_boxes(run)
    table = Table("container", "run", "owner", "state", "age", "orphan")
    for box in boxes:
        table.add_row(box.id[:12], box.run, box.owner, box.state, f"{box.age_s:.0f} s", box.orphan)
    out().print(table if boxes else "no containers of the sandbox")


@sandbox.command(epilog=example("toolrl sandbox reap", "toolrl sandbox reap --run quickstart-cpu"))
def reap(run: str = typer.Option(None, "--run", help="Only of this run.")) -> None:
    """Remove containers whose owner is dead or whose lease is over; never those of a run that lives."""
    from sandbox import reap as remove_orphans

    with _told():
        removed = remove_orphans(run)
    for box in removed:
        out().print(f"removed {box.id[:12]} of run {box.run}: {box.orphan}", markup=False)
    out().print(f"{len(removed)} removed")


@contextmanager
def _told() -> Iterator[None]:
    """The sandbox's refusals are the user's to mend."""
    from sandbox import SandboxError

    try:
        yield
    except SandboxError as error:
        raise UserError(f"the sandbox cannot be used: {error}; `toolrl doctor` says what is missing") from error


async def _run(config: SandboxConfig, code: str, timeout_s: float) -> RunResult:
    from sandbox import SandboxPool

    async with SandboxPool(config) as pool:
        session = await pool.acquire(episode_id="cli")
        try:
            return await session.run(code, timeout_s=timeout_s)
        finally:
            await session.release()


async def _findings(config: SandboxConfig) -> list[Finding]:
    from sandbox.selfcheck import run_checks

    return [finding async for finding in run_checks(config)]


async def _figures(config: SandboxConfig, boxes: tuple[int, ...], jupyter: str | None) -> list[Figure]:
    from sandbox.measure import measure

    figures = []
    async for figure in measure(config, boxes=boxes, jupyter=jupyter):
        print(f"measured: {figure.what}", file=sys.stderr)
        figures.append(figure)
    return figures
