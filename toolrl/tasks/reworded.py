"""A task source whose prompts are put into other words; what is asked for, and how it is checked, stays.

Invariant: only whole phrases of the table change, each character of the text at most once; numbers, code and names that are
in no phrase stand as they stood, in their order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from toolrl.config_wording import WordingConfig
from toolrl.tasks.task import Message, Task, TaskSource


class Reworded:
    """`source` in the words of `wording`."""

    def __init__(self, source: TaskSource, wording: WordingConfig) -> None:
        self._source = source
        self._wording = wording
        self.size = source.size
        self.verifiers = source.verifiers

    def task(self, index: int) -> Task:
        return self._reworded(self._source.task(index))

    def held_out(self) -> list[Task]:
        return [self._reworded(task) for task in self._source.held_out()]

    def _reworded(self, task: Task) -> Task:
        return replace(task, messages=[self._message(message) for message in task.messages])

    def _message(self, message: Message) -> Message:
        said = self._wording
        phrases, frame = {
            "system": (said.system, said.system_frame),
            "user": (said.question, said.question_frame),
        }.get(message["role"], ({}, None))
        return {**message, "content": in_other_words(message["content"], phrases, frame)}


def in_other_words(text: str, phrases: Mapping[str, str], frame: str | None = None) -> str:
    """`text` with each phrase replaced, the longest first; without any in it, `text` in the `{}` of `frame`."""
    if phrases:
        longest_first = sorted(phrases, key=len, reverse=True)
        whole = "|".join(rf"(?<!\w){re.escape(phrase)}(?!\w)" for phrase in longest_first)
        text, count = re.subn(whole, lambda found: phrases[found.group(0)], text)
        if count:
            return text
    return text if frame is None or not text.strip() else frame.replace("{}", text, 1)
