"""The command-line application that the command files add themselves to, and how its output looks."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import typer
from rich.console import Console

from toolrl.errors import UserError

TRAIN = "Train"
LOOK = "Look"
TRADE = "Tools of the trade"
_ENGINES = ("torch", "ray", "vllm", "deepspeed", "transformers")

RUNS_DIR = typer.Option("runs", "--runs-dir", help="Where runs live.", show_default=True)
OVERRIDES = typer.Argument(None, metavar="[KEY=VALUE]...", help="Settings that differ.")
RUN = typer.Argument(metavar="RUN", help="A run's name or its folder.")

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,  # `main` decides which errors keep their traceback
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass
class Options:
    """What may stand anywhere on the command line."""

    quiet: bool = False
    debug: bool = False


def out() -> Console:
    """For results. Made at each call, so that a redirected stdout is seen; wide enough for tables when it is a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def err() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def example(*lines: str) -> str:
    """The `Examples` block at the end of a command's help."""
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"  [cyan]{line}[/cyan]" for line in lines)


def need_engines() -> None:
    """Raises UserError when the libraries of the loop are not installed."""
    absent = [name for name in _ENGINES if importlib.util.find_spec(name) is None]
    if absent:
        raise UserError(
            f"not installed: {', '.join(absent)}; run `make setup`, or pip install 'toolrl[cpu]' (or [gpu])"
        )
