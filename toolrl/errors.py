"""Errors that the user can mend: said in a few lines with what, where, which value and what to do.

Everything derived from `UserError` ends a command with exit code 2 and no traceback, everything derived from `RunError` with
exit code 1. Any other exception is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class UserError(ValueError):
    """The user can mend this; the message says how."""


class RunError(RuntimeError):
    """A part of the run is lost or late, and the run cannot go on; the message says which and how to continue."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config (or only odd, when `warning`)."""

    key: str  # the full key, e.g. tasks.families.0.weight; empty when the problem is with the whole file
    message: str  # what is wrong and what to do
    value: Any = None
    has_value: bool = True
    where: str = ""  # "run.yaml:12", "command line", "preset math-4b:9"; empty: the default
    warning: bool = False

    def __str__(self) -> str:
        subject = f"{self.key} = {self.value!r}" if self.key and self.has_value else self.key
        return ": ".join(part for part in (self.where, subject, self.message) if part)


class ConfigError(UserError):
    """A config that cannot run. Holds every problem found, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
