"""Tasks from a file with one task a row, JSONL or Parquet, in the columns that verl's users already have.

| ours | column by default | |
|---|---|---|
| `prompt` | `prompt` | a list of messages, or the question as a string |
| `ground_truth` | `reward_model.ground_truth` | a dot enters a nested column |
| `data_source` | `data_source` | optional; the task's family |
| `extra_info` | `extra_info` | optional; given to the verifier |

`tasks.columns` names other columns, e.g. `{prompt: question, ground_truth: answer}`.

Invariants: every row is checked when the file is read; each epoch is a permutation of the training rows that depends on
the seed and the epoch alone; which rows are held out depends on the prompts alone, and no training row has a held-out
row's prompt.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolrl.config import TaskConfig
from toolrl.errors import UserError
from toolrl.registry import nearest
from toolrl.tasks.sources import sources
from toolrl.tasks.task import Message, Task, messages_of

log = logging.getLogger(__name__)

COLUMNS = {
    "prompt": "prompt",
    "ground_truth": "reward_model.ground_truth",
    "data_source": "data_source",
    "extra_info": "extra_info",
}
OPTIONAL = ("data_source", "extra_info")
_ABSENT = object()


@sources.register("rows")
def from_file(config: TaskConfig, seed: int) -> Rows:
    """The source over the file `config.path`."""
    if not config.path:
        raise UserError("tasks.path is empty: name a JSONL or Parquet file")
    for option in config.options:
        if option != "ground_truth_after":
            raise UserError(f"tasks.options has no key {option!r} for a file; known: ground_truth_after")
    return Rows(read_file(Path(config.path)), config, seed, where=config.path)


class Rows:
    """A source over rows that lie in memory."""

    def __init__(self, rows: Sequence[dict[str, Any]], config: TaskConfig, seed: int, *, where: str) -> None:
        reader = RowReader(config, where)
        tasks = [reader.task(number, row) for number, row in enumerate(rows, start=1)]
        self._held_out, self._training = split_by_prompt(tasks, config.held_out_tasks, where)
        self._shuffle = config.shuffle
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])
        self.size = len(self._training)
        self.verifiers = [reader.verifier]

    def task(self, index: int) -> Task:
        if index < 0:
            raise IndexError(f"task index {index}: indices count up from 0")
        epoch, position = divmod(index, self.size)
        return self._training[self._permutation(epoch)[position] if self._shuffle else position]

    def held_out(self) -> list[Task]:
        return list(self._held_out)

    def _permutation(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(self.size))
            random.Random(f"{self._seed}/epoch/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]


class RowReader:
    """Turns one row into a task, or says which row, which column and which value is wrong."""

    def __init__(self, config: TaskConfig, where: str) -> None:
        unknown = [name for name in config.columns if name not in COLUMNS]
        if unknown:
            raise UserError(f"tasks.columns has no key {unknown[0]!r}{nearest(unknown[0], list(COLUMNS))}")
        self.verifier = config.verifier or "math"
        self._columns = {**COLUMNS, **config.columns}
        self._marker = config.options.get("ground_truth_after")
        self._system_prompt = config.system_prompt
        self._where = where

    def task(self, number: int, row: dict[str, Any]) -> Task:
        """`number` counts from 1, as editors do."""
        extra = self._value(number, row, "extra_info")
        family = self._value(number, row, "data_source")
        family = "rows" if family in (_ABSENT, None) else str(family)
        extra = {} if extra in (_ABSENT, None) else extra
        difficulty = extra.get("difficulty", {}) if isinstance(extra, dict) else {}
        return Task(
            id=f"{family}-row-{number}",
            family=family,
            messages=self._messages(number, self._value(number, row, "prompt")),
            ground_truth=self._ground_truth(number, self._value(number, row, "ground_truth")),
            verifier=self.verifier,
            metadata={"family": family, "difficulty": difficulty},
            details={"data_source": family, "extra_info": extra},
        )

    def _value(self, number: int, row: dict[str, Any], name: str) -> Any:
        value: Any = row
        for part in [self._columns[name]] if self._columns[name] in row else self._columns[name].split("."):
            value = value.get(part, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is _ABSENT and name not in OPTIONAL:
            raise UserError(
                f"{self._where}, row {number}: no column {self._columns[name]!r} (it has {', '.join(map(str, row))}); "
                f"name the right one with tasks.columns.{name}=COLUMN"
            )
        return value

    def _messages(self, number: int, prompt: Any) -> list[Message]:
        problem = f"{self._where}, row {number}, column {self._columns['prompt']!r}: "
        if isinstance(prompt, str):
            return messages_of(prompt, self._system_prompt)
        if not isinstance(prompt, list) or not prompt:
            raise UserError(f"{problem}must be a string or a list of messages, got {_short(prompt)}")
        for message in prompt:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise UserError(f"{problem}a message must hold role and content, got {_short(message)}")
            if message["role"] not in ("system", "user", "assistant") or not isinstance(message["content"], str):
                raise UserError(f"{problem}role must be system, user or assistant and content text: {_short(message)}")
        if prompt[-1]["role"] != "user":
            raise UserError(f"{problem}the last message must be the user's, got {_short(prompt[-1])}")
        messages = [{"role": message["role"], "content": message["content"]} for message in prompt]
        return messages if messages[0]["role"] == "system" else [*messages_of("", self._system_prompt)[:-1], *messages]

    def _ground_truth(self, number: int, value: Any) -> Any:
        problem = f"{self._where}, row {number}, column {self._columns['ground_truth']!r}: "
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            raise UserError(f"{problem}no answer can equal {value!r}; remove the row or give it a ground truth")
        if self._marker is not None:
            if not isinstance(value, str) or self._marker not in value:
                raise UserError(f"{problem}tasks.options.ground_truth_after={self._marker!r} is not in {_short(value)}")
            value = value.rpartition(self._marker)[2].strip()
        accepted = value if isinstance(value, list) else [value]
        if self.verifier == "math" and not all(isinstance(one, str | int | float) for one in accepted):
            raise UserError(
                f"{problem}math-verify takes text or numbers, got {_short(value)}; "
                "set tasks.verifier to your own function"
            )
        return value


def split_by_prompt(tasks: list[Task], count: int, where: str) -> tuple[list[Task], list[Task]]:
    """(held out, training): the `count` distinct prompts with the lowest digests, and the rows of all others."""
    digests = [_digest(task) for task in tasks]
    by_digest: dict[str, Task] = {}
    for digest, task in zip(digests, tasks, strict=True):
        by_digest.setdefault(digest, task)
    if count >= len(by_digest):
        raise UserError(
            f"{where} has {len(by_digest)} distinct prompts and tasks.held_out_tasks={count} of them are kept apart: "
            "nothing is left for training; lower it"
        )
    chosen = dict.fromkeys(sorted(by_digest)[:count])
    training = [task for digest, task in zip(digests, tasks, strict=True) if digest not in chosen]
    return [by_digest[digest] for digest in chosen], training


def read_file(path: Path) -> list[dict[str, Any]]:
    """Every row of a JSONL or Parquet file, told apart by the file's ending."""
    if not path.is_file():
        raise UserError(f"tasks.path={str(path)!r} is no file")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
        return rows
    if path.suffix not in (".jsonl", ".json"):
        raise UserError(f"tasks.path={str(path)!r}: the name must end in .jsonl or .parquet")
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number} is not JSON ({error}): {_short(line)}") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number} must be an object with one key a column, got {_short(row)}")
            rows.append(row)
    return rows


def _digest(task: Task) -> str:
    conversation = [(message["role"], message["content"].strip()) for message in task.messages]
    conversation = [(role, content) for role, content in conversation if role != "system"]
    return hashlib.sha256(json.dumps(conversation).encode()).hexdigest()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
