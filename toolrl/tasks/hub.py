"""Tasks from a dataset by name, read with the library datasets and mapped as `rows` does it.

`tasks.path` is a name on the Hub (`openai/gsm8k`) or a folder that datasets can read; `tasks.options.name`, `.revision`
and `.data_files` are passed on to `datasets.load_dataset`.
"""

from __future__ import annotations

from typing import Any

from toolrl.config import TaskConfig
from toolrl.errors import UserError
from toolrl.registry import nearest
from toolrl.tasks.rows import Rows
from toolrl.tasks.sources import sources

_PASSED_ON = ("name", "revision", "data_files")
_OURS = ("ground_truth_after",)


@sources.register("hub")
def from_hub(config: TaskConfig, seed: int) -> Rows:
    """The source over the split `config.split` of the dataset `config.path`."""
    if not config.path:
        raise UserError("tasks.path is empty: name a dataset, e.g. tasks.path=openai/gsm8k")
    for option in config.options:
        if option not in _PASSED_ON + _OURS:
            raise UserError(
                f"tasks.options has no key {option!r} for a dataset{nearest(option, [*_PASSED_ON, *_OURS])}"
            )
    return Rows(load(config), config, seed, where=f"{config.path} ({config.split})")


def load(config: TaskConfig) -> list[dict[str, Any]]:
    """Every row of the split."""
    import datasets

    passed_on = {key: value for key, value in config.options.items() if key in _PASSED_ON}
    try:
        loaded = datasets.load_dataset(config.path, split=config.split, **passed_on)
    # The library raises a dozen unrelated classes for a wrong name, a missing network and a wrong split.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        offline = " (offline mode is on)" if datasets.config.HF_HUB_OFFLINE else ""
        raise UserError(
            f"dataset {config.path!r}, split {config.split!r} cannot be loaded{offline}: {reason}. Check the name "
            "and the split, or download it once and give its folder, or a JSONL or Parquet file with tasks.kind=rows"
        ) from error
    rows: list[dict[str, Any]] = loaded.to_list()
    return rows
