"""Tasks made by reasoning_gym's generators: any mix of its families with weights and options.

Invariants:
- `task(index)` costs the same at every index: the family is drawn by a hash of (seed, index), and a generator is asked
  for one item of a chunk whose seed is such a hash too. Nothing is counted and nothing is kept but the current chunk of
  each family.
- Held-out questions come from streams of their own that no run's seed changes, and a training draw whose question is
  held out is passed over for the next draw of the same index. So runs of different seeds are evaluated on the same
  questions, none of which any of them was trained on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import random
import sys
from typing import Any

from toolrl.config import FamilyConfig, TaskConfig
from toolrl.errors import UserError
from toolrl.registry import nearest
from toolrl.tasks.sources import sources
from toolrl.tasks.task import Task, messages_of

log = logging.getLogger(__name__)

# Some generators draw a table for the whole dataset when they are made, so a dataset stays small and a stream is made
# of many.
CHUNK = 500
TRIES = 256  # draws for one index before a family counts as too small to leave anything beside the held-out tasks
# These walk over sets of strings, so that their items change with Python's hash seed, from one process to the next.
HASH_DEPENDENT = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note")
_OURS = ("seed", "size")
_TYPES: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}


@sources.register("reasoning_gym")
class ReasoningGym:
    """An endless source over a weighted mix of families."""

    size = None

    def __init__(self, config: TaskConfig, seed: int) -> None:
        if not config.families:
            raise UserError("tasks.families is empty: name at least one, e.g. tasks.families='[{name: chain_sum}]'")
        self._config = config
        self._seed = seed
        self._families = [Family(family) for family in config.families]
        self._weights = [family.weight for family in config.families]
        if not any(self._weights):
            raise UserError("the weights of tasks.families are all 0: give one of them a positive weight")
        self.verifiers = [config.verifier or "reasoning_gym"]

    def task(self, index: int) -> Task:
        if index < 0:
            raise IndexError(f"task index {index}: indices count up from 0")
        family = self._draw_family(index)
        for attempt in range(TRIES):
            entry = family.entry(f"{self._seed}/train/{attempt}", index)
            if entry["question"] not in self._held_out_questions:
                return self._task(family, entry, f"{family.name}-{index}")
        raise UserError(
            f"family {family.name!r} with options {family.options}: {TRIES} draws in a row gave held-out questions; "
            f"widen its options or lower tasks.held_out_tasks (now {self._config.held_out_tasks})"
        )

    def held_out(self) -> list[Task]:
        return list(self._held_out)

    @functools.cached_property
    def _held_out(self) -> list[Task]:
        tasks: list[Task] = []
        taken: set[str] = set()
        shares = apportion(self._config.held_out_tasks, self._weights)
        for family, share in zip(self._families, shares, strict=True):
            # Two entries of one family (easy, hard) share a name; their held-out tasks must not share an id.
            first = sum(task.family == family.name for task in tasks)
            entries = family.distinct(share, taken)
            if len(entries) < share:
                log.warning(
                    "family %r with options %s has few distinct questions: %d held out instead of %d",
                    *(family.name, family.options, len(entries), share),
                )
            for number, entry in enumerate(entries, start=first):
                tasks.append(self._task(family, entry, f"{family.name}-held-out-{number}"))
        return tasks

    @functools.cached_property
    def _held_out_questions(self) -> frozenset[str]:
        return frozenset(task.question for task in self._held_out)

    def _draw_family(self, index: int) -> Family:
        draw = random.Random(_number(f"{self._seed}/family/{index}"))
        return draw.choices(self._families, self._weights)[0]

    def _task(self, family: Family, entry: dict[str, Any], task_id: str) -> Task:
        return Task(
            id=task_id,
            family=family.name,
            messages=messages_of(entry["question"], self._config.system_prompt),
            ground_truth=entry["answer"],
            verifier=self._config.verifier or "reasoning_gym",
            metadata={
                "family": family.name,
                # Tuples become the lists that they will be after any storage.
                "difficulty": json.loads(json.dumps(entry["metadata"].get("difficulty", {}), default=str)),
            },
            details={"family": family.name, "options": family.options, "entry": entry},
        )


class Family:
    """One family with its options: an endless, seekable stream of entries for every stream name."""

    def __init__(self, config: FamilyConfig) -> None:
        self.name = config.name
        self.options = dict(config.options)
        self._check(config.weight)
        self._chunks: dict[tuple[str, int], Any] = {}  # a few of the last used
        self._chunk("check", 0)  # wrong options fail here, before anything starts

    def entry(self, stream: str, index: int) -> dict[str, Any]:
        """The entry at `index` of `stream`: reasoning_gym's dict of question, answer and metadata."""
        entry: dict[str, Any] = self._chunk(stream, index // CHUNK)[index % CHUNK]
        return entry

    def distinct(self, count: int, taken: set[str]) -> list[dict[str, Any]]:
        """Up to `count` held-out entries whose questions are not in `taken`, which grows by them.

        Fewer when the family is small: draws repeat themselves as its questions run out, and at one repeat for four
        taken about half of them are used up. The other half is left for training.
        """
        entries: list[dict[str, Any]] = []
        repeats = 0
        index = 0
        while len(entries) < count and repeats <= len(entries) // 4:
            entry = self.entry("held-out", index)
            index += 1
            if entry["question"] in taken:
                repeats += 1
                continue
            taken.add(entry["question"])
            entries.append(entry)
        return entries

    def _chunk(self, stream: str, number: int) -> Any:
        key = (stream, number)
        if key not in self._chunks:
            if len(self._chunks) >= 4:
                del self._chunks[next(iter(self._chunks))]
            seed = _number(f"{self.name}/{stream}/{number}")
            self._chunks[key] = dataset(self.name, {**self.options, "size": CHUNK, "seed": seed})
        return self._chunks[key]

    def _check(self, weight: float) -> None:
        config_class = known_families().get(self.name)
        if config_class is None:
            raise UserError(f"unknown reasoning_gym family {self.name!r}{nearest(self.name, list(known_families()))}")
        if not 0 <= weight < float("inf"):
            raise UserError(f"family {self.name!r}: weight {weight} is not a number of at least 0")
        if self.name in HASH_DEPENDENT and sys.flags.hash_randomization:
            raise UserError(
                f"family {self.name!r} gives other tasks in every process unless Python's hash seed is fixed: "
                "set the environment variable PYTHONHASHSEED=0 or leave the family out"
            )
        fields = {field.name: field for field in dataclasses.fields(config_class) if field.name not in _OURS}
        for option, value in self.options.items():
            if option in _OURS:
                raise UserError(f"family {self.name!r}: option {option!r} is set by toolrl; remove it")
            if option not in fields:
                raise UserError(f"family {self.name!r}: unknown option {option!r}{nearest(option, list(fields))}")
            wanted = type(fields[option].default)
            if wanted in _TYPES and (
                not isinstance(value, _TYPES[wanted]) or (isinstance(value, bool) and wanted is not bool)
            ):
                raise UserError(f"family {self.name!r}: option {option!r} must be {wanted.__name__}, got {value!r}")


def known_families() -> dict[str, type]:
    """reasoning_gym's families and their option classes; `composite` is left out, the mix being ours."""
    import reasoning_gym  # noqa: F401  (registers its families; slow, so not at import)
    from reasoning_gym.factory import DATASETS

    return {name: config for name, (_, config) in DATASETS.items() if name != "composite"}


def dataset(name: str, options: dict[str, Any]) -> Any:
    """The generator called `name`. Raises UserError when its own checks refuse the options."""
    from reasoning_gym.factory import create_dataset

    try:
        return create_dataset(name, **options)
    except (AssertionError, ValueError, TypeError) as error:
        shown = {key: value for key, value in options.items() if key not in _OURS}
        raise UserError(f"family {name!r} refuses the options {shown}: {error}") from error


def apportion(total: int, weights: list[float]) -> list[int]:
    """[n_weights] `total` split by weight, largest remainders first; the parts sum to `total`."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: parts[i] - exact[i])
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


def _number(text: str) -> int:
    """A seed below NumPy's 2**32, far from those of similar texts: generators add the index to their seed."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % (2**32 - CHUNK)
