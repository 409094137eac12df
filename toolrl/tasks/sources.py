"""The registry of task sources: a source is made by a function of the task settings and the run's seed."""

from __future__ import annotations

from collections.abc import Callable

from toolrl.config import TaskConfig
from toolrl.registry import Registry
from toolrl.tasks.task import TaskSource

sources: Registry[Callable[[TaskConfig, int], TaskSource]] = Registry("task source")
