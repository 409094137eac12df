"""The command `toolrl`. One command a file; heavy imports happen inside the commands, so that `--help` needs no torch.

Exit codes: 0 done, 1 a check failed (doctor, ledger) or a run broke off, 2 the user can mend it, 130 interrupted; no traceback
for any of them unless `--debug`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

import toolrl
from toolrl.app.cli.app import Options, app, err
from toolrl.errors import RunError, UserError

# Imported for their commands, in the order in which `--help` lists them.
from toolrl.app.cli import train, launch, scale, continue_, stop, evaluate, cold_start  # isort: skip
from toolrl.app.cli import status, logs, show, monitor, explain, ledger  # isort: skip
from toolrl.app.cli import presets, config, plan, doctor, sandbox, bench  # isort: skip

__all__ = ["app", "main"]
_COMMANDS = (
    train,
    launch,
    scale,
    continue_,
    stop,
    evaluate,
    cold_start,
    status,
    logs,
    show,
    monitor,
    explain,
    ledger,
    presets,
    config,
    plan,
    doctor,
    sandbox,
    bench,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"toolrl {toolrl.__version__}")
        raise typer.Exit


@app.callback()
def toolrl_(
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Plain log lines instead of the live screen."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks of mistakes too."),
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Train language models that think in several turns and call tools between them.

    Start with [cyan]toolrl doctor[/cyan], then [cyan]toolrl train quickstart-cpu[/cyan].
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. `--quiet` and `--debug` may stand anywhere."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = Options(
        quiet=bool({"--quiet", "-q"} & set(arguments)),
        debug="--debug" in arguments,
    )
    arguments = [word for word in arguments if word not in ("--quiet", "-q", "--debug")]
    try:
        app(args=arguments, prog_name="toolrl", obj=options)
    except (UserError, RunError) as error:
        if options.debug:
            raise
        for line in str(error).splitlines():
            err().print(f"[red]error:[/red] {_plain(line)}" if not line.startswith("- ") else _plain(line))
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        if options.debug:
            raise
        err().print("interrupted")
        sys.exit(130)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
