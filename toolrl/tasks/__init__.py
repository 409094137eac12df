"""Tasks: where questions come from and how answers are checked.

`build(config, seed)` gives a `TaskSource`; `AnswerChecker` scores an answer in a process with a deadline. Importing
this package loads neither reasoning_gym nor datasets nor math-verify.
"""

from __future__ import annotations

from toolrl.config import TaskConfig
from toolrl.config_wording import WordingConfig
from toolrl.tasks import hub, reasoning_gym, rows
from toolrl.tasks.checker import AnswerChecker, VerifierFailed
from toolrl.tasks.reworded import Reworded
from toolrl.tasks.sources import sources
from toolrl.tasks.task import Message, Task, TaskSource

__all__ = ["AnswerChecker", "Message", "Task", "TaskSource", "VerifierFailed", "build", "sources"]

_BUILT_IN = (reasoning_gym, rows, hub)  # importing them registers their sources


def build(config: TaskConfig, seed: int) -> TaskSource:
    """The source that `config` describes.

    Raises:
        UnknownName: `config.kind` is neither registered nor an import path.
        ValueError: a setting or the data is wrong; the message names it, its value and the remedy.
    """
    source = sources.get(config.kind)(config, seed)
    return source if config.wording == WordingConfig() else Reworded(source, config.wording)
