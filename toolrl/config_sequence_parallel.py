"""Which ranks can share a packed row: `learner.sequence_parallel` beside the ranks and the model's attention heads.

The heads are read from a model's `config.json`: with the settings where the model is a folder, else as soon as the run's folder
holds it, before anything starts.
Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolrl.config import RunConfig
from toolrl.errors import Problem

KEY = "learner.sequence_parallel"


def sequence_parallel_problems(config: RunConfig) -> Iterator[Problem]:
    """Every reason why the ranks cannot share rows as configured."""
    size, ranks = config.learner.sequence_parallel, config.learner.ranks
    if size <= 1:
        return
    if ranks % size:
        message = f"ranks that share a row must divide learner.ranks={ranks}; set ranks to a multiple of {size}"
        yield Problem(KEY, message, size)
    for path in (config.model.path, config.critic.model):
        if path and (problem := heads_of_model_problem(size, Path(path).expanduser())):
            yield problem


def heads_of_model_problem(size: int, folder: Path) -> Problem | None:
    """Why `size` ranks cannot share rows of the model in a Hugging Face folder; None too where it does not tell its heads."""
    heads = _heads_of(folder)
    why = None if heads is None else heads_problem(*heads, size)
    return None if why is None else Problem(KEY, f"{why} ({folder})", size)


def heads_problem(heads: int, key_value_heads: int, size: int) -> str | None:
    """Why `size` ranks cannot share out the attention heads of a model; None: they can.

    Each rank attends with heads / size of the heads and with the key and value heads that belong to them: key_value_heads / size
    of its own, or, where there are fewer than ranks, one that size / key_value_heads ranks have in common.
    """
    if heads % size:
        even = [divisor for divisor in range(1, heads + 1) if heads % divisor == 0]
        return f"must divide the model's {heads} attention heads; one of {', '.join(map(str, even))}"
    if key_value_heads % size and size % key_value_heads:
        return f"must divide the model's {key_value_heads} key and value heads, or be a multiple of them"
    return None


def _heads_of(folder: Path) -> tuple[int, int] | None:
    """(attention heads, key and value heads) of a Hugging Face folder; None where it does not say."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    told: dict[str, Any] = json.loads(file.read_text())
    told = told.get("text_config", told)
    heads = told.get("num_attention_heads")
    return None if heads is None else (heads, told.get("num_key_value_heads") or heads)
